"""A decoder that predicts the next token, in NNX, its layers stacked for `scan`.

Vaswani et al. 2017, "Attention is all you need", with the norms before each half of a
layer (Xiong et al. 2020). Its arguments cover the networks of GPT-2 (Radford et al.
2019: learned positions, layer norms, biases, GELU) and of Llama (Touvron et al. 2023:
rotary positions, root-mean-square norms, SwiGLU of Shazeer 2020, and heads that share
keys and values, Ainslie et al. 2023). What a layer adds to the stream starts smaller
the more layers there are (Radford et al. 2019, §2.3).

Parameters of all layers are stacked: each leaf under `blocks` has a leading axis of
layers, whether the layers run in a `scan` or one after the other.
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal, variance_scaling
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Attention, attend, check_attention
from models.rotary import Rotary, rotate
from replicator.base.types import PyTree
from replicator.collectives.moments import wider_dtype
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_number,
    check_word,
)

TENSOR_PARALLEL: Mapping[str, tuple[str | None, ...]] = {
    "*/embedding": ("model",),
    "*/qkv/kernel": (None, None, None, "model"),
    "*/out/kernel": (None, "model"),
    "*/up*/kernel": (None, None, "model"),
    "*/down/kernel": (None, "model"),
}
"""Rules for `strategies.tensor_parallel`: heads (with the keys and values that they
share), hidden features and the vocabulary are cut; norms, biases and positions stay
whole. Each half of a layer adds up over `model` once (Shoeybi et al. 2019,
"Megatron-LM", §3). They hold for every kind of network that the arguments make."""

_POLICIES: Mapping[object, Callable[..., bool] | None] = {
    True: None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

# Small, as logits are products with the same table (Radford et al. 2019).
_TABLE = normal(0.02)


Norm = nnx.RMSNorm | nnx.LayerNorm


class Transformer(nnx.Module):
    """A decoder-only language model."""

    def __init__(
        self,
        *,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        context: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        mlp_width: int | None = None,
        mlp: str = "gelu",
        norm: str = "rms",
        norm_epsilon: float = 1e-6,
        bias: bool = False,
        positions: str | Rotary = "rotary",
        tied: bool = True,
        scan: bool = True,
        remat: bool | str = False,
        attention: Attention = "xla",
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained network.

        Args:
          vocabulary: Number of different tokens.
          layers: Pairs of attention and perceptron.
          width: Features of a token between layers.
          heads: Of attention.
          context: The longest sequence, in tokens.
          kv_heads: Number of keys and values that the heads share, in groups of equal
            size; by default each head has its own.
          head_size: Features of a head; by default heads share the width.
          mlp_width: Hidden features of the perceptrons; by default four times the
            width, and for `"swiglu"`, which has a third matrix, two thirds of that.
          mlp: Hidden function of the perceptrons: `"gelu"`, by its tanh formula, or
            `"swiglu"`.
          norm: `"rms"`, or `"layer"`: with the mean taken out.
          norm_epsilon: Added to the mean square, or the variance, of a norm.
          bias: Whether products with weights, but for the logits, and layer norms add a
            bias.
          positions: `"rotary"`, a `Rotary` with other speeds, or `"learned"`: a vector
            for each.
          tied: Whether logits are computed with the table of embeddings, or with
            another one.
          scan: Whether layers run in a loop, which compiles once for all of them.
          remat: Compute each layer again for its gradient, and keep only its input;
            `"dots"` also keeps its products with weights.
          attention: Kernel of attention: XLA's; or `"cudnn"` on NVIDIA's GPUs from
            Ampere on, which keeps no products of queries with keys (Dao 2023,
            "FlashAttention-2") and takes half precision; or `"blocks"`, which keeps
            those of one block of queries at a time, and computes them again.
          compute_dtype: Of the activations, for example `jnp.bfloat16`; None takes that
            of the parameters, which are float32.
          rngs: Random keys for the parameters.

        Raises:
          ArgumentError: An argument breaks its rule, or heads do not divide the width,
            or `kv_heads` the heads.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if mlp_width is None:
            mlp_width = 8 * math.ceil(width / 3) if mlp == "swiglu" else 4 * width
        counts = {"vocabulary": vocabulary, "layers": layers, "width": width}
        counts |= {"heads": heads, "kv_heads": kv_heads, "context": context}
        for name, count in (counts | {"mlp_width": mlp_width}).items():
            check_count(name, count)
        check_word("mlp", mlp, ("gelu", "swiglu"))
        check_attention(attention, compute_dtype)
        check_flags(bias=bias, tied=tied, scan=scan)
        if remat is not False and remat not in _POLICIES:
            raise ArgumentError(
                f"`remat` must be True, False or 'dots', got {remat!r}. Pass one of "
                "these."
            )
        rotary = _rotary(positions)
        _check_heads(width, heads, kv_heads, head_size, rotary)
        make_table = functools.partial(
            _table, vocabulary, width, compute_dtype=compute_dtype, rngs=rngs
        )
        make_norm = _norm_maker(norm, width, epsilon=norm_epsilon, bias=bias)
        make_block = functools.partial(
            Block,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size or width // heads,
            mlp_width=mlp_width,
            gated=mlp == "swiglu",
            make_norm=make_norm,
            bias=bias,
            rotary=rotary,
            residual_scale=1 / (2 * layers),
            attention=attention,
            compute_dtype=compute_dtype,
        )
        self.embed = make_table()
        self.positions: nnx.Param | None = nnx.data(None)
        if rotary is None:
            self.positions = nnx.Param(_TABLE(rngs.params(), (context, width)))
        keys = jax.random.split(rngs.params(), layers)
        self.blocks = nnx.vmap(lambda key: make_block(rngs=nnx.Rngs(key)))(keys)
        self.norm = make_norm(rngs=rngs)
        self.head: nnx.Embed | None = nnx.data(None)
        if not tied:
            self.head = make_table()
        self.layers = layers
        self.context = context
        self.scan = scan
        self.remat = remat

    def __call__(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time vocabulary"]:
        """Compute the logits of the token after each one.

        Args:
          tokens: Sequences, no longer than the context.

        Returns:
          Unnormalised log-probabilities, in float32 at least; those at `time` have seen
          no later token.

        Raises:
          ArgumentError: Sequences are longer than the context.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ArgumentError(
                f"`tokens` must be sequences of at most {self.context}, got {time}. "
                f"Cut them, or make the network with `context={time}`."
            )
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions[:time][None].astype(x.dtype)
        x = self._through_blocks(x)
        table = self.embed if self.head is None else self.head
        logits = table.attend(_normed(self.norm, x))
        return logits.astype(wider_dtype(logits.dtype, jnp.float32))

    def _through_blocks(self, x: Array) -> Array:
        graphdef, stacked = nnx.split(self.blocks)

        def layer(x: Array, params: PyTree) -> tuple[Array, None]:
            return nnx.merge(graphdef, params)(x), None

        if self.remat:
            policy = _POLICIES[self.remat]
            layer = jax.checkpoint(layer, prevent_cse=not self.scan, policy=policy)
        if self.scan:
            return jax.lax.scan(layer, x, stacked)[0]
        for number in range(self.layers):
            x, _ = layer(x, jax.tree.map(lambda leaf, i=number: leaf[i], stacked))
        return x


class Block(nnx.Module):
    """A layer: attention, then a perceptron, each added to the stream."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        mlp_width: int,
        gated: bool,
        make_norm: Callable[..., Norm],
        bias: bool,
        rotary: Rotary | None,
        residual_scale: float,
        attention: Attention,
        compute_dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make one layer.

        Args:
          width: Features of a token.
          heads: Of attention.
          kv_heads: Number of keys and values, which heads share in groups.
          head_size: Features of a head.
          mlp_width: Hidden features of the perceptron.
          gated: Whether hidden features are products with a gate (SwiGLU), or GELUs.
          make_norm: Makes a norm from `rngs`.
          bias: Whether products with weights add a bias.
          rotary: Speeds at which queries and keys turn; None turns none.
          residual_scale: Variance of what each half adds at first.
          attention: Kernel of attention.
          compute_dtype: Of the activations; None takes that of the parameters.
          rngs: Random keys for the parameters.
        """
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=bias, dtype=compute_dtype, rngs=rngs
        )
        inner = variance_scaling(1.0, "fan_in", "normal")
        last = variance_scaling(residual_scale, "fan_in", "normal")
        self.attention_norm = make_norm(rngs=rngs)
        # For each pair of key and value the queries of its group, the key, the value.
        shape = (heads // kv_heads + 2, kv_heads, head_size)
        self.qkv = linear(width, shape, kernel_init=inner)
        self.out = linear((heads, head_size), width, axis=(-2, -1), kernel_init=last)
        self.mlp_norm = make_norm(rngs=rngs)
        self.up = linear(width, mlp_width, kernel_init=inner)
        self.down = linear(mlp_width, width, kernel_init=last)
        self.up_gate: nnx.LinearGeneral | None = nnx.data(None)
        if gated:
            self.up_gate = linear(width, mlp_width, kernel_init=inner)
        self.rotary = rotary
        self.attention: Attention = attention

    def __call__(
        self, x: Float[Array, "batch time width"]
    ) -> Float[Array, "batch time width"]:
        """Let each token see those before it, then compute on its own."""
        qkv = self.qkv(_normed(self.attention_norm, x))
        key, value = qkv[:, :, -2], qkv[:, :, -1]
        # Heads of one group lie side by side.
        query = qkv[:, :, :-2].swapaxes(2, 3).reshape(*x.shape[:2], -1, key.shape[-1])
        if self.rotary is not None:
            query, key = rotate(query, self.rotary), rotate(key, self.rotary)
        x = x + self.out(attend(query, key, value, kernel=self.attention))
        normed = _normed(self.mlp_norm, x)
        if self.up_gate is None:
            hidden = jax.nn.gelu(self.up(normed))
        else:
            hidden = jax.nn.silu(self.up_gate(normed)) * self.up(normed)
        return x + self.down(hidden)


def _rotary(positions: str | Rotary) -> Rotary | None:
    if isinstance(positions, Rotary):
        return positions
    check_word("positions", positions, ("rotary", "learned"))
    return Rotary() if positions == "rotary" else None


def _check_heads(
    width: int,
    heads: int,
    kv_heads: int,
    head_size: int | None,
    rotary: Rotary | None,
) -> None:
    # Rotations turn pairs of features.
    multiple = 2 * heads if rotary else heads
    if head_size is not None:
        check_count("head_size", head_size)
        if rotary and head_size % 2:
            raise ArgumentError(
                "`head_size` must be even with rotary positions, got "
                f"{head_size}. Use {head_size + 1}."
            )
    elif width % multiple:
        positions = "rotary" if rotary else "learned"
        raise ArgumentError(
            f"`width` must be a multiple of {multiple} for {heads} heads with "
            f"{positions} positions, got {width}. "
            f"Use {multiple * math.ceil(width / multiple)}."
        )
    if heads % kv_heads:
        raise ArgumentError(
            f"`kv_heads` must divide the {heads} heads, got {kv_heads}. "
            f"Use {math.gcd(heads, kv_heads)}."
        )


def _norm_maker(
    norm: str, width: int, *, epsilon: float, bias: bool
) -> Callable[..., Norm]:
    check_word("norm", norm, ("rms", "layer"))
    check_number("norm_epsilon", epsilon)
    if norm == "rms":
        return functools.partial(nnx.RMSNorm, width, epsilon=epsilon)
    # The fast variance cancels where the mean is large.
    return functools.partial(
        nnx.LayerNorm,
        width,
        epsilon=epsilon,
        use_bias=bias,
        use_fast_variance=False,
    )


def _table(
    size: int, width: int, *, compute_dtype: DTypeLike | None, rngs: nnx.Rngs
) -> nnx.Embed:
    table = nnx.Embed(size, width, embedding_init=_TABLE, rngs=rngs)
    # flax would take None for the dtype that parameters are made in, and keep to that.
    table.dtype = compute_dtype  # pyright: ignore[reportAttributeAccessIssue]
    return table


def _normed(norm: Norm, x: Array) -> Array:
    with jax.numpy_dtype_promotion("standard"):  # flax widens half precision inside
        return norm(x).astype(x.dtype)


def next_token_nats(
    model: Transformer, tokens: Int[Array, "batch time1"]
) -> Float[Array, "batch time"]:
    """Compute the loss of each token but the first, which nothing comes before.

    Args:
      model: Predicts `time` tokens from those before them.
      tokens: Sequences of `time + 1`.

    Returns:
      Negative log-probabilities, in nats.

    >>> model = Transformer(
    ...     vocabulary=16, layers=2, width=8, heads=2, context=4, rngs=nnx.Rngs(0))
    >>> next_token_nats(model, jnp.ones((3, 5), int)).shape
    (3, 4)
    """
    log_probs = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]


def nats_to_bits(nats: Float[Array, "*any"] | float) -> Float[Array, "*any"] | float:
    """Convert losses; where tokens are characters the mean is bits per character.

    >>> float(nats_to_bits(jnp.log(8.0)))
    3.0
    """
    return nats / math.log(2)
