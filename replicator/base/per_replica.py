"""Declare a value that differs between replicas; everything else is equal on all.

Outside a step such a value has a leading replica axis, cut over `replica`; inside, the
step sees the slice of its own replica.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicator.base.mesh import replica_spec
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

OnResize = Literal["sum", "mean", "first", "refuse"]
_ON_RESIZE = ("sum", "mean", "first", "refuse")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["on_resize"]
)
@dataclasses.dataclass(frozen=True)
class PerReplica:
    """A value of which each replica holds its own.

    As a metric it keeps its dtype. Under accumulation a leaf with a row per example has
    the rows of all microbatches, in order; of any other leaf, floats are averaged over
    microbatches, integers and booleans are those of the last.

    Attributes:
      value: Any pytree. Inside a step: one replica's own value. In `init_fn`: what
        each replica begins with, the same for all; for values of their own hand a row
        for each to `rep.put`. Outside: leaves have a leading replica axis.
      on_resize: What a restore on another number of replicas makes of it: each new
        replica starts from the `sum` (shared out evenly), the `mean` or the `first`;
        or the restore is refused.

    State that differs between replicas, a row for each:

    >>> def init_fn(key):
    ...     return {"seen": PerReplica(jnp.zeros((), jnp.int32), on_resize="sum")}
    >>> def step_fn(state, batch):
    ...     seen = state["seen"].value + len(batch["x"])      # this replica's row
    ...     return {"seen": PerReplica(seen, on_resize="sum")}, {}
    """

    value: PyTree
    on_resize: OnResize = "refuse"

    def __post_init__(self) -> None:
        if self.on_resize not in _ON_RESIZE:
            raise ArgumentError(
                f"`on_resize` must be one of {', '.join(_ON_RESIZE)}, got "
                f"{self.on_resize!r}. Say what a restore on another number of replicas "
                "should do."
            )


def is_per_replica(node: PyTree) -> bool:
    """Tell whether `node` is a declared per-replica value."""
    return isinstance(node, PerReplica)


def per_replica_specs(tree: PyTree) -> list[PartitionSpec]:
    """Return the spec of each leaf: declared ones cut over replicas, others whole."""
    return [
        replica_spec() if declared else PartitionSpec()
        for _, declared in declared_leaves(tree)
    ]


def declared_leaves(tree: PyTree) -> list[tuple[str, bool]]:
    """List (path, whether declared per replica) of the leaves of `tree`.

    The leaves of a declared value bear its path.
    """
    return [
        (path, is_per_replica(node))
        for path, node in named_leaves(tree, is_leaf=is_per_replica)
        for _ in jax.tree.leaves(node)
    ]


def take_own(tree: PyTree) -> PyTree:
    """Drop the replica axis (length 1 inside a step) of every declared leaf."""
    return _map_declared(lambda leaf: leaf[0], tree)


def give_own(tree: PyTree) -> PyTree:
    """Put the replica axis (length 1 inside a step) back on every declared leaf."""
    return _map_declared(lambda leaf: jnp.asarray(leaf)[None], tree)


def repeat_own(tree: PyTree, *, num_replicas: int) -> PyTree:
    """Give every replica the declared value of `tree`, under a leading replica axis."""
    return _map_declared(
        lambda leaf: jnp.broadcast_to(leaf, (num_replicas, *jnp.shape(leaf))), tree
    )


def _map_declared(function, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda node: jax.tree.map(function, node) if is_per_replica(node) else node,
        tree,
        is_leaf=is_per_replica,
    )
