"""A language model's step twice: for replicator under `fsdp`, and written by hand.

By hand is what an expert writes for `jit` over a mesh: each weight is gathered where it
is used, by a function whose backward pass puts the gradient in pieces, and layers are
computed again, so that the loop does not keep whole weights for its way back.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.transformer import Transformer, next_token_nats
from replicator.base.types import Key, PyTree, StepFn
from replicator.nnx import params_of, value_and_grad, with_params

Loss = Callable[[Transformer, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a model and its batch; see `Transformer`."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    global_batch: int
    compute_dtype: Any = None

    def make_model(self, key: Key) -> Transformer:
        """Return an untrained model whose layers are computed again backwards."""
        return Transformer(
            vocabulary=self.vocabulary,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            context=self.context,
            compute_dtype=self.compute_dtype,
            remat=True,
            rngs=nnx.Rngs(key),
        )

    def batch(self) -> PyTree:
        """Return random tokens, int32 [global_batch, context + 1]."""
        shape = (self.global_batch, self.context + 1)
        tokens = np.random.default_rng(0).integers(0, self.vocabulary, shape)
        return {"tokens": tokens.astype(np.int32)}


def mean_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of a token, as a user writes it."""
    return next_token_nats(model, tokens).mean()


def trainer(
    sizes: Sizes, tx: optax.GradientTransformation, loss_fn: Loss = mean_loss
) -> tuple[Callable[[Key], PyTree], StepFn]:
    """Return `init_fn` and `step_fn` as for one device."""

    def init_fn(key: Key) -> PyTree:
        model = sizes.make_model(key)
        return {"model": model, "opt": tx.init(params_of(model))}

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, model), gradient = value_and_grad(loss_fn)(
            state["model"], batch["tokens"]
        )
        params = params_of(model)
        updates, opt = tx.update(gradient, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def hand_written_step(
    sizes: Sizes, tx: optax.GradientTransformation, mesh: Mesh, shardings: PyTree
) -> jax.stages.Wrapped:
    """Return the step as an expert writes it, jitted over the axis `shard`.

    Args:
      sizes: Of the model.
      tx: The optimizer.
      mesh: With an axis `shard`, over which batches are cut.
      shardings: Of the state, a leaf each.
    """
    loss = functools.partial(_loss_by_hand, mesh, shardings["model"])
    _, step_fn = trainer(sizes, tx, loss)
    rows = NamedSharding(mesh, PartitionSpec("shard"))
    return jax.jit(
        step_fn,
        in_shardings=(shardings, {"tokens": rows}),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )


def _loss_by_hand(
    mesh: Mesh, shardings: PyTree, model: Transformer, tokens: jax.Array
) -> jax.Array:
    def gathered(module: nnx.Module, stored: nnx.Module) -> Any:
        graphdef, params = nnx.split(module)
        specs = jax.tree.map(lambda each: each.spec, nnx.split(stored)[1])
        return nnx.merge(graphdef, jax.tree.map(use, params, specs))

    def use(weight: jax.Array, spec: PartitionSpec) -> jax.Array:
        return _gather(weight, NamedSharding(mesh, spec))

    graphdef, stacked = nnx.split(model.blocks)
    # Of one layer: without the axis of layers.
    specs = jax.tree.map(
        lambda each: PartitionSpec(*each.spec[1:]), nnx.split(shardings.blocks)[1]
    )

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x: jax.Array, params: PyTree) -> tuple[jax.Array, None]:
        return nnx.merge(graphdef, jax.tree.map(use, params, specs))(x), None

    x = gathered(model.embed, shardings.embed)(tokens[:, :-1])
    x, _ = jax.lax.scan(layer, x, stacked)
    x = gathered(model.norm, shardings.norm)(x)
    logits = gathered(model.embed, shardings.embed).attend(x)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(weight: jax.Array, stored: NamedSharding) -> jax.Array:
    whole = NamedSharding(stored.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(weight, whole)


_gather.defvjp(
    lambda weight, stored: (_gather(weight, stored), None),
    lambda stored, _, gradient: (jax.lax.with_sharding_constraint(gradient, stored),),
)
