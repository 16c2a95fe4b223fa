"""A decoder that predicts the next token, in NNX, its layers stacked for `scan`.

Vaswani et al. 2017, "Attention is all you need", with the norms before each half of a
layer (Xiong et al. 2020), root-mean-square norms, no biases, and rotary positions (Su
et al. 2021, "RoFormer", §3.4.2) or learned ones. What a layer adds to the stream starts
smaller the more layers there are (Radford et al. 2019, §2.3).

Parameters of all layers are stacked: each leaf under `blocks` has a leading axis of
layers, whether the layers run in a `scan` or one after the other.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import normal, variance_scaling
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from replicator.base.types import PyTree
from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError, check_count, check_flags, check_word

TENSOR_PARALLEL: Mapping[str, tuple[str | None, ...]] = {
    "*/embedding": ("model",),
    "*/qkv/kernel": (None, None, None, "model"),
    "*/out/kernel": (None, "model"),
    "*/up/kernel": (None, None, "model"),
    "*/down/kernel": (None, "model"),
}
"""Rules for `strategies.tensor_parallel`: heads, hidden features and the vocabulary are
cut, norms and positions stay whole. Each half of a layer adds up over `model` once
(Shoeybi et al. 2019, "Megatron-LM", §3)."""

# Small, as logits are products with the same table (Radford et al. 2019).
_TABLE = normal(0.02)


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
        mlp_width: int | None = None,
        positions: str = "rotary",
        tied: bool = True,
        scan: bool = True,
        remat: bool = False,
        compute_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make an untrained network.

        Args:
          vocabulary: Number of different tokens.
          layers: Pairs of attention and perceptron.
          width: Features of a token between layers.
          heads: Of attention; they share the width.
          context: The longest sequence, in tokens.
          mlp_width: Hidden features of the perceptrons; four times the width by
            default.
          positions: `"rotary"`, or `"learned"`: a vector for each.
          tied: Whether logits are computed with the table of embeddings, or with
            another one.
          scan: Whether layers run in a loop, which compiles once for all of them.
          remat: Compute each layer again for its gradient, and keep only its input.
          compute_dtype: Of the activations, for example `jnp.bfloat16`; None takes that
            of the parameters, which are float32.
          rngs: Random keys for the parameters.

        Raises:
          ArgumentError: An argument breaks its rule, or heads do not divide the width.
        """
        mlp_width = 4 * width if mlp_width is None else mlp_width
        counts = {"vocabulary": vocabulary, "layers": layers, "width": width}
        counts |= {"heads": heads, "context": context, "mlp_width": mlp_width}
        for name, count in counts.items():
            check_count(name, count)
        check_word("positions", positions, ("rotary", "learned"))
        check_flags(tied=tied, scan=scan, remat=remat)
        # Rotations turn pairs of features.
        multiple = 2 * heads if positions == "rotary" else heads
        if width % multiple:
            raise ArgumentError(
                f"`width` must be a multiple of {multiple} for {heads} heads with "
                f"{positions} positions, got {width}. "
                f"Use {multiple * math.ceil(width / multiple)}."
            )
        make_table = functools.partial(
            _table, vocabulary, width, compute_dtype=compute_dtype, rngs=rngs
        )
        make_block = functools.partial(
            Block,
            width=width,
            heads=heads,
            mlp_width=mlp_width,
            rotary=positions == "rotary",
            residual_scale=1 / (2 * layers),
            compute_dtype=compute_dtype,
        )
        self.embed = make_table()
        self.positions: nnx.Param | None = nnx.data(None)
        if positions == "learned":
            self.positions = nnx.Param(_TABLE(rngs.params(), (context, width)))
        keys = jax.random.split(rngs.params(), layers)
        self.blocks = nnx.vmap(lambda key: make_block(rngs=nnx.Rngs(key)))(keys)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
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
            layer = jax.checkpoint(layer, prevent_cse=not self.scan)
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
        mlp_width: int,
        rotary: bool,
        residual_scale: float,
        compute_dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make one layer.

        Args:
          width: Features of a token.
          heads: Of attention.
          mlp_width: Hidden features of the perceptron.
          rotary: Whether queries and keys are turned by their positions.
          residual_scale: Variance of what each half adds at first.
          compute_dtype: Of the activations; None takes that of the parameters.
          rngs: Random keys for the parameters.
        """
        size = width // heads
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=False, dtype=compute_dtype, rngs=rngs
        )
        inner = variance_scaling(1.0, "fan_in", "normal")
        last = variance_scaling(residual_scale, "fan_in", "normal")
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = linear(width, (3, heads, size), kernel_init=inner)
        self.out = linear((heads, size), width, axis=(-2, -1), kernel_init=last)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = linear(width, mlp_width, kernel_init=inner)
        self.down = linear(mlp_width, width, kernel_init=last)
        self.rotary = rotary

    def __call__(
        self, x: Float[Array, "batch time width"]
    ) -> Float[Array, "batch time width"]:
        """Let each token see those before it, then compute on its own."""
        qkv = self.qkv(_normed(self.attention_norm, x))
        query, key, value = (qkv[:, :, number] for number in range(3))
        if self.rotary:
            query, key = rotate(query), rotate(key)
        x = x + self.out(attend(query, key, value))
        hidden = jax.nn.gelu(self.up(_normed(self.mlp_norm, x)))
        return x + self.down(hidden)


def _table(
    size: int, width: int, *, compute_dtype: DTypeLike | None, rngs: nnx.Rngs
) -> nnx.Embed:
    table = nnx.Embed(size, width, embedding_init=_TABLE, rngs=rngs)
    # flax would take None for the dtype that parameters are made in, and keep to that.
    table.dtype = compute_dtype  # pyright: ignore[reportAttributeAccessIssue]
    return table


def _normed(norm: nnx.RMSNorm, x: Array) -> Array:
    with jax.numpy_dtype_promotion("standard"):  # flax widens half precision inside
        return norm(x).astype(x.dtype)


def attend(
    query: Float[Array, "batch time heads size"],
    key: Float[Array, "batch time heads size"],
    value: Float[Array, "batch time heads size"],
) -> Float[Array, "batch time heads size"]:
    """Return for each token the values of those up to it, weighted by their keys."""
    if query.dtype != jnp.float64:
        with jax.numpy_dtype_promotion("standard"):  # jax widens half precision inside
            return jax.nn.dot_product_attention(query, key, value, is_causal=True)
    # There jax (0.12) would still take the softmax in single precision, and answers in
    # double would differ between numbers of devices as those in single do.
    products = jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
    is_seen = jnp.tril(jnp.ones(products.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(products, where=is_seen)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def rotate(
    x: Float[Array, "batch time heads size"], *, base: float = 10_000.0
) -> Float[Array, "batch time heads size"]:
    """Turn pairs of features by angles that grow with the position.

    Products of a query and a key then depend on the distance between them (Su et al.
    2021, eq. 34). Feature i and feature i + size / 2 are a pair.

    Args:
      x: Queries or keys.
      base: The slowest pair turns about once in so many positions, times 2π.

    Returns:
      As many features of the same norm.
    """
    time, half = x.shape[1], x.shape[3] // 2
    speeds = base ** (-np.arange(half) / half)
    angles = np.arange(time)[:, None] * speeds
    dtype = wider_dtype(x.dtype, jnp.float32)
    cos, sin = (
        jnp.asarray(part[None, :, None], dtype)
        for part in (np.cos(angles), np.sin(angles))
    )
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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
