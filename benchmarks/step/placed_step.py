"""A language model's step under `jit` over a mesh, its placement written by hand.

By hand means: whoever writes the model knows how each weight is kept, and says at each
use how it is multiplied, and how its gradient is kept. Layers are computed again
backwards, so that their loop keeps no whole weights. `models/transformer.py` knows
nothing of that.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.step.step_pair import replicator_step
from benchmarks.tasks import Task
from models.transformer import TENSOR_PARALLEL, Transformer
from replicator import strategies
from replicator.base.types import PyTree
from replicator.nnx import value_and_grad
from replicator.strategies import Strategy

Multiplied = Literal["whole", "in pieces"]

PAIRS: tuple[tuple[Strategy, Multiplied], ...] = (
    (strategies.fsdp(), "whole"),
    (strategies.tensor_parallel(TENSOR_PARALLEL, model=4, replicas=2), "in pieces"),
)
"""Strategies of eight devices, and what an expert writes for each."""


def placed_step(
    task: Task,
    tx: optax.GradientTransformation,
    shardings: PyTree,
    *,
    multiplied: Multiplied = "whole",
) -> jax.stages.Wrapped:
    """Return the step as an expert writes it, jitted; it takes over the state.

    Args:
      task: `tasks.language_model(..., remat=True)`, tied, with rotary positions.
      tx: The optimizer.
      shardings: Of the state, a leaf each.
      multiplied: Whether weights are gathered where they are used, or multiplied in the
        pieces that they are kept in.
    """
    loss_fn = functools.partial(_placed_loss, shardings["model"], multiplied)
    by_hand = dataclasses.replace(task, value_and_grad=value_and_grad(loss_fn))
    return jitted(by_hand, tx, shardings)


def jitted(
    by_hand: Task, tx: optax.GradientTransformation, shardings: PyTree
) -> jax.stages.Wrapped:
    """Return the step of a task whose loss says where weights lie, jitted."""
    mesh = jax.tree.leaves(shardings)[0].mesh
    rows = NamedSharding(mesh, PartitionSpec(("replica", "shard")))
    return jax.jit(
        replicator_step(by_hand, optax.with_extra_args_support(tx)),
        in_shardings=(shardings, rows),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )


def _placed_loss(
    shardings: Any, multiplied: Multiplied, model: Transformer, batch: PyTree
) -> jax.Array:
    use = functools.partial(use_placed, multiplied)
    # Of one layer: without the axis of layers.
    of_layer = jax.tree.map(
        lambda kept: NamedSharding(kept.mesh, PartitionSpec(*kept.spec[1:])),
        shardings.blocks,
    )

    def layer(x: jax.Array, block: PyTree) -> tuple[jax.Array, None]:
        return jax.tree.map(use, block, of_layer)(x), None

    tokens = batch["tokens"]
    table = jax.tree.map(use, model.embed, shardings.embed)
    x = table(tokens[:, :-1])
    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, model.blocks)
    logits = table.attend(jax.tree.map(use, model.norm, shardings.norm)(x))
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def use_placed(
    multiplied: Multiplied, weight: jax.Array, kept: NamedSharding
) -> jax.Array:
    """Return a weight as it is multiplied; its gradient lies as the weight is kept."""
    whole = NamedSharding(kept.mesh, PartitionSpec())
    where = whole if multiplied == "whole" else kept
    return jax.lax.with_sharding_constraint(weight, where)


use_placed.defvjp(
    lambda multiplied, weight, kept: (use_placed(multiplied, weight, kept), None),
    lambda multiplied, kept, _, gradient: (
        jax.lax.with_sharding_constraint(gradient, kept),
    ),
)
