"""Declare a value that differs between replicas; everything else is equal on all.

Outside a step such a value has a leading replica axis, cut over `replica`; inside, the
step sees the slice of its own replica.
"""

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicator.base.mesh import replica_spec
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.errors import check_word

OnResize = Literal["sum", "mean", "first", "refuse"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["on_resize"]
)
@dataclasses.dataclass(frozen=True)
class PerReplica:
    """A value that differs between replicas: each has its own.

    As a metric it keeps its dtype. Under accumulation a leaf with a row per example has
    the rows of all microbatches, in order; of any other leaf, floats are averaged over
    microbatches, integers and booleans are those of the last.

    Attributes:
      value: Any pytree. Inside a step: one replica's own value. In `init_fn`: the first
        value, the same for all replicas; to give each its own, pass a row for each to
        `rep.put`. Outside: leaves have a leading replica axis.
      on_resize: Treatment by a restore on another number of replicas: each new replica
        starts from the `sum` (divided evenly), the `mean` or the `first`; or the
        restore is refused.

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
        check_word("on_resize", self.on_resize, get_args(OnResize))


def is_per_replica(node: PyTree) -> bool:
    """Return whether `node` is a declared per-replica value.

    >>> is_per_replica(PerReplica(0))
    True
    """
    return isinstance(node, PerReplica)


def per_replica_specs(tree: PyTree) -> list[PartitionSpec]:
    """Return the spec of each leaf: declared ones cut over replicas, others whole.

    >>> per_replica_specs({"own": PerReplica(0), "w": 0.0})
    [P('replica',), P()]
    """
    return [
        replica_spec() if declared else PartitionSpec()
        for _, declared in declared_leaves(tree)
    ]


def declared_leaves(tree: PyTree) -> list[tuple[str, bool]]:
    """List (path, whether declared per replica) of the leaves of `tree`.

    The leaves of a declared value have its path.

    >>> declared_leaves({"own": PerReplica(0), "w": 0.0})
    [('own', True), ('w', False)]
    """
    return [
        (path, is_per_replica(node))
        for path, node in named_leaves(tree, is_leaf=is_per_replica)
        for _ in jax.tree.leaves(node)
    ]


def take_own(tree: PyTree) -> PyTree:
    """Drop the replica axis (length 1 inside a step) of every declared leaf.

    >>> take_own(PerReplica(np.ones((1, 3)))).value.shape
    (3,)
    """
    return _map_declared(lambda leaf: leaf[0], tree)


def give_own(tree: PyTree) -> PyTree:
    """Put the replica axis (length 1 inside a step) back on every declared leaf.

    >>> give_own(PerReplica(jnp.ones(3))).value.shape
    (1, 3)
    """
    return _map_declared(lambda leaf: jnp.asarray(leaf)[None], tree)


def repeat_own(tree: PyTree, *, num_replicas: int) -> PyTree:
    """Repeat declared values for every replica, under a leading replica axis.

    >>> repeat_own(PerReplica(jnp.ones(3)), num_replicas=8).value.shape
    (8, 3)
    """
    return _map_declared(
        lambda leaf: jnp.broadcast_to(leaf, (num_replicas, *jnp.shape(leaf))), tree
    )


def _map_declared(function, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda node: jax.tree.map(function, node) if is_per_replica(node) else node,
        tree,
        is_leaf=is_per_replica,
    )
