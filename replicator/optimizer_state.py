"""What a wrapped optimizer carries from update to update, and within one.

The slot `pending` says what `update` is to do: nothing there means reduce and update;
`Collecting` add up, `Collected` update from the sums, `Show` tell the gradients too.
That is part of the structure of the state, so it is known while a step is traced.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax

from replicator.loss_scale import LossScaleState
from replicator.per_replica import PerReplica
from replicator.protocols import PyTree

Reduction = Literal["fast", "ordered"]


def _node(*, data: tuple[str, ...], meta: tuple[str, ...] = ()):
    return functools.partial(
        jax.tree_util.register_dataclass, data_fields=data, meta_fields=meta
    )


@_node(data=("total", "weight", "count"), meta=("calls", "weighted"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Collecting:
    """Gradients add up: the step is running over the microbatches of one update.

    Attributes:
      total: Sum of weighted gradients so far, or None before the first.
      weight: Sum of weights so far, a scalar of JAX's default float.
      count: Microbatches so far, an int32 scalar.
      calls: How often `update` was called in this run of the step.
      weighted: Whether `update` was given weights.
    """

    total: PyTree
    weight: jax.Array
    count: jax.Array
    calls: int = 0
    weighted: bool = False


@_node(data=("total", "weight", "count"), meta=("weighted", "show"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """All microbatches of the update are in the sums: reduce them and update.

    Attributes:
      total: Sum of weighted gradients.
      weight: Sum of weights, a scalar of JAX's default float.
      count: How many microbatches, an int32 scalar.
      weighted: Whether `update` was given weights.
      show: Which gradients `update` hands back as `Shown`: those it was given, and does
        not use (the analysis asks what they depend on), or the reduced ones.
    """

    total: PyTree
    weight: jax.Array
    count: jax.Array
    weighted: bool = False
    show: Literal["nothing", "given", "reduced"] = "nothing"


@_node(data=())
@dataclasses.dataclass(frozen=True)
class Show:
    """Ask an update without accumulation for the reduced gradients, as `Shown`."""


@_node(data=("gradients",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """The gradients that were asked for."""

    gradients: PyTree


@_node(data=("total", "weight", "count"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSums:
    """Sums of an own loop that feeds microbatches one by one."""

    total: PerReplica
    weight: PerReplica
    count: jax.Array


@_node(
    data=("inner", "gradient_norm", "skipped", "scale", "pending"),
    meta=("name", "reduction"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """State of a wrapped optimizer.

    Attributes:
      inner: State of the wrapped transformation.
      gradient_norm: Global norm of the last gradient that was not skipped, reduced.
      skipped: Updates skipped for a non-finite gradient, int32; None if not asked for.
      scale: The dynamic loss scale, or None.
      pending: None between updates; sums under accumulation.
      name: Which parameters it updates: the first component of their path.
      reduction: How its gradients add up.
    """

    inner: PyTree
    gradient_norm: jax.Array
    skipped: jax.Array | None
    scale: LossScaleState | None
    pending: Collecting | Collected | Show | Shown | OwnSums | None
    name: str
    reduction: Reduction


def is_optimizer_state(node: PyTree) -> bool:
    """Tell whether `node` is the state of a wrapped optimizer."""
    return isinstance(node, OptimizerState)


def without_pending(tree: PyTree) -> PyTree:
    """Drop what accumulation keeps in the optimizer states of `tree`."""
    return with_pending(tree, [None] * len(optimizer_states(tree)))


def with_pending(tree: PyTree, pending: Sequence) -> PyTree:
    """Put `pending` into the optimizer states of `tree`, in leaf order."""
    rest = iter(pending)
    return jax.tree.map(
        lambda node: (
            dataclasses.replace(node, pending=next(rest))
            if is_optimizer_state(node)
            else node
        ),
        tree,
        is_leaf=is_optimizer_state,
    )


def optimizer_states(tree: PyTree) -> list[OptimizerState]:
    """List the states of wrapped optimizers in `tree`, in leaf order."""
    nodes = jax.tree.leaves(tree, is_leaf=is_optimizer_state)
    return [node for node in nodes if is_optimizer_state(node)]
