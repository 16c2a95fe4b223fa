"""Replicas of a collective: their number, this one's place, groups.

A step runs with the mesh axis `replica` bound. Where no axis is bound there is no
replica context, and every collective acts as one replica would: the same function runs
on one device without a `Replicator`. An axis that was named but is not bound, and a
`shard_map` over axes of other names, are refused: there that would be wrong.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import describe, first_without_numbers, named_leaves
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The replicas of one collective; `name` is None outside any replica context."""

    name: str | None
    size: int
    groups: Groups | None = None

    @property
    def group_size(self) -> int:
        """Number of replicas in a group; groups must be equally large."""
        return len(self.groups[0]) if self.groups else self.size


_partitioned = jax.make_user_context(None)
_in_init = jax.make_user_context(None)


def one_replica_on_many_devices() -> AbstractContextManager[None]:
    """Refuse, inside a `with` block, functions that are for many replicas only."""
    return _partitioned(True)


def one_state_for_all() -> AbstractContextManager[None]:
    """Refuse, inside a `with` block, functions that distinguish replicas."""
    return _in_init(True)


def refuse_in_init(what: str) -> None:
    """Refuse `what` while `init_fn` is traced, which makes one state for all replicas.

    Raises:
      ArgumentError: It is.
    """
    if _in_init.value:
        raise ArgumentError(
            f"{what} must be called in a step, got a call in `init_fn`, whose state is "
            "the first of all replicas. For a state of each replica's own call "
            "`rep.put(state)` with a row for each in `PerReplica(rows)`."
        )


def is_partitioned() -> bool:
    """Return whether a step is traced whose strategy makes all devices one replica.

    >>> is_partitioned()
    False
    """
    return bool(_partitioned.value)


def refuse_if_partitioned(what: str, remedy: str) -> None:
    """Refuse `what` while a step is traced whose strategy partitions.

    Raises:
      ArgumentError: One is.
    """
    if _partitioned.value:
        raise ArgumentError(
            f"{what} must be left to strategies that replicate, got one that "
            f"partitions: the step is one replica on all devices. {remedy}"
        )


def num_replicas(*, axis_name: str = REPLICA_AXIS) -> int:
    """Return the number of replicas of this step; 1 outside any replica context.

    Args:
      axis_name: Mesh axis to ask about.

    Returns:
      A Python integer: it is known while the step is traced.

    Raises:
      ArgumentError: `axis_name` is a dead axis.

    >>> num_replicas()                    # outside a `Replicator`
    1
    """
    return resolve_axis(axis_name).size


def replica_id(*, axis_name: str = REPLICA_AXIS) -> Int[Array, ""]:
    """Return this replica's number, from 0; always 0 outside any replica context.

    Args:
      axis_name: Mesh axis to ask about.

    Returns:
      A scalar int32 that differs between replicas.

    Raises:
      ArgumentError: `axis_name` is a dead axis, the strategy partitions, or this is
        `init_fn`.

    >>> jax.vmap(lambda x: x + replica_id(), axis_name="replica")(jnp.zeros(3, int))
    Array([0, 1, 2], dtype=int32)
    """
    refuse_in_init("`replica_id`")
    refuse_if_partitioned(
        "`replica_id`", "Use `example_keys`, or `strategies.data_parallel()`."
    )
    return position(resolve_axis(axis_name))


def resolve_axis(axis_name: str, groups: Sequence[Sequence[int]] | None = None) -> Axis:
    """Find the replicas that `axis_name` and `groups` stand for where this is called.

    Args:
      axis_name: Mesh axis to look up.
      groups: Replica ids of each group, or None for all in one.

    Returns:
      The axis, with no name where the default axis is unbound.

    Raises:
      ArgumentError: The axis is dead, or the groups do not name every replica once.
    """
    try:
        axis = Axis(name=axis_name, size=lax.axis_size(axis_name))
        if _partitioned.value and axis_name == REPLICA_AXIS:
            axis = Axis(name=None, size=1)  # bound for JAX's own collectives alone
    except NameError:  # JAX offers no other way to ask whether an axis is bound
        _check_not_dead(axis_name)
        axis = Axis(name=None, size=1)
    if groups is None:
        return axis
    refuse_if_partitioned(
        "`groups`", "Leave them out, or use `strategies.data_parallel()`."
    )
    return dataclasses.replace(axis, groups=_checked_groups(groups, axis.size))


def resolve_equal_axis(axis_name: str, groups: Sequence[Sequence[int]] | None) -> Axis:
    """Find replicas as `resolve_axis` does, and refuse groups of unequal size too."""
    axis = resolve_axis(axis_name, groups)
    if axis.groups and len({len(group) for group in axis.groups}) > 1:
        raise ArgumentError(
            f"`groups` must be equally large here, got {_listed(axis.groups)}. Only "
            "`all_reduce` with `reduction='fast'` and an `op` other than 'product' "
            "takes unequal ones."
        )
    return axis


def position(axis: Axis) -> Int[Array, ""]:
    """Return this replica's place on `axis`, from 0."""
    if axis.name is None:
        return jnp.zeros((), jnp.int32)
    return lax.axis_index(axis.name)


def with_arrays(tree: PyTree) -> PyTree:
    """Turn Python and NumPy leaves into JAX arrays, so that each has a dtype.

    Raises:
      ArgumentError: A leaf is neither a number nor an array.

    >>> with_arrays({"w": 1.5})
    {'w': Array(1.5, dtype=float32, weak_type=True)}
    """
    if found := first_without_numbers(tree):
        raise ArgumentError(
            f"`tree` must hold arrays and numbers, got {found}. Leave it out."
        )
    return jax.tree.map(jnp.asarray, tree)


def check_divides(tree: PyTree, axis: Axis) -> None:
    """Refuse a leaf whose axis 0 cannot be cut into equal slices, one per replica."""
    for path, leaf in named_leaves(tree):
        if leaf.ndim == 0 or leaf.shape[0] % axis.group_size:
            raise ArgumentError(
                f"`tree` must have an axis 0 that divides by {axis.group_size} "
                f"replicas, got {describe(leaf)}{at_leaf(path)}. Pad the leaf."
            )


def check_dtypes(tree: PyTree, accepted: tuple[type, ...], *, rule: str) -> None:
    """Refuse a leaf whose dtype is not one of `accepted`; `rule` begins the error."""
    for path, leaf in named_leaves(tree):
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in accepted):
            raise ArgumentError(
                f"{rule}, got {describe(leaf)}{at_leaf(path)}. "
                "Cast the leaf first, or leave it out."
            )


def at_leaf(path: str) -> str:
    """Return how an error names a leaf; a tree that is one array has no path.

    >>> at_leaf("params/w")
    ' (leaf `params/w`)'
    """
    return f" (leaf `{path}`)" if path else ""


def _check_not_dead(axis_name: str) -> None:
    # Axes that `jax.vmap` binds are not listed: JAX has no public way to ask.
    bound = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name == REPLICA_AXIS and not bound:
        return
    alive = ", ".join(f"'{name}'" for name in bound) or "none"
    raise ArgumentError(
        f"`axis_name` must name a live axis, got the dead axis '{axis_name}' (bound by "
        f"`shard_map` here: {alive}). Pass the `axis_name` of the mesh that runs this."
    )


def _checked_groups(groups: Sequence[Sequence[int]], size: int) -> Groups:
    try:
        checked = tuple(tuple(int(replica) for replica in group) for group in groups)
    except (TypeError, ValueError) as failure:
        raise ArgumentError(
            f"`groups` must be lists of replicas in a list, got {groups!r}. All in one "
            f"group is {_listed((tuple(range(size)),))}."
        ) from failure
    if sorted(sum(checked, ())) != list(range(size)) or not all(checked):
        raise ArgumentError(
            f"`groups` must name each of the {size} replicas exactly once, got "
            f"{_listed(checked)}. All in one group is {_listed((tuple(range(size)),))}."
        )
    return checked


def _listed(groups: Groups) -> list[list[int]]:
    return [list(group) for group in groups]
