"""The form that all trajectories have, and memory for a fixed number of them.

A row is one trajectory: a leaf of it has the shape of an inserted leaf without the
first axis.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.launchpad_bridge.trajectories.table import TrajectoryError

Slots = np.ndarray | slice
"""Which rows of the memory: int64 [n], or n that follow each other."""


class RowForm:
    """Structure, shapes and dtypes of a trajectory.

    Attributes:
      names: Paths of the leaves.
    """

    def __init__(self, like: PyTree) -> None:
        """Take the form of one trajectory.

        Args:
          like: One: leaves without the first axis, arrays or `jax.ShapeDtypeStruct`s.
        """
        named = named_leaves(like)
        self.names = tuple(name for name, _ in named)
        self._rows = [(np.shape(leaf), _dtype_of(leaf)) for _, leaf in named]
        self._structure = jax.tree.structure(like)

    def check(self, trajectories: PyTree, actor: str) -> list[np.ndarray]:
        """Return the leaves of trajectories that have this form.

        Args:
          trajectories: Leaves [n, ...].
          actor: Whose they are.

        Raises:
          TrajectoryError: They have another form, or leaves of different n; it names
            actor and leaf.
        """
        found, structure = jax.tree.flatten(trajectories)
        leaves = [np.asarray(leaf) for leaf in found]
        wrong = (
            self._first_difference(trajectories, leaves)
            if structure != self._structure
            else self._first_other_leaf(leaves)
            or _first_other_count(self.names, leaves)
        )
        if wrong:
            raise TrajectoryError(
                f"`trajectories` of {actor} must have the form of the first ones: "
                f"{wrong}. Change what this actor inserts."
            )
        return leaves

    def make_rows(self, count: int) -> list[np.ndarray]:
        """Return new leaves [count, ...], with nothing in them yet."""
        return [np.empty((count, *shape), dtype) for shape, dtype in self._rows]

    def to_tree(self, leaves: Sequence[np.ndarray]) -> PyTree:
        """Return leaves as trajectories."""
        return jax.tree.unflatten(self._structure, leaves)

    def _first_other_leaf(self, leaves: Sequence[np.ndarray]) -> str | None:
        for name, (shape, dtype), leaf in zip(
            self.names, self._rows, leaves, strict=True
        ):
            if leaf.dtype != dtype or leaf.ndim == 0 or leaf.shape[1:] != shape:
                got = f"{leaf.dtype}[{_sizes(leaf.shape)}]"
                return f"`{name}` must be {dtype}[{_sizes(('n', *shape))}], got {got}"
        return None

    def _first_difference(
        self, trajectories: PyTree, leaves: Sequence[np.ndarray]
    ) -> str:
        names = [name for name, _ in named_leaves(trajectories)]
        for name in self.names:
            if name not in names:
                return f"`{name}` is missing"
        for name in names:
            if name not in self.names:
                return f"`{name}` is new"
        structure = jax.tree.structure(trajectories)
        return f"they must be {self._structure}, got {structure}"


def form_of(trajectories: PyTree, actor: str) -> RowForm:
    """Return the form of the first trajectories that came.

    Args:
      trajectories: Leaves [n, ...].
      actor: Whose they are.

    Raises:
      TrajectoryError: They are no arrays of one n of at least 1.
    """
    named = [(name, np.asarray(leaf)) for name, leaf in named_leaves(trajectories)]
    wrong = None if named else "there is no array in them"
    for name, leaf in named:
        if leaf.ndim == 0:
            wrong = f"`{name}` must have a first axis, of trajectories"
        elif not _holds_numbers(leaf.dtype):
            wrong = f"`{name}` must hold numbers, got {leaf.dtype}"
    wrong = wrong or _first_other_count(*zip(*named, strict=True))
    if wrong:
        raise TrajectoryError(
            f"`trajectories` of {actor} must be arrays, one row for each: {wrong}. "
            "Change what this actor inserts."
        )
    return RowForm(jax.tree.map(lambda leaf: np.asarray(leaf)[0], trajectories))


class RowMemory:
    """Memory for so many trajectories, from its beginning to its end.

    It knows nothing of who uses which rows: no two threads may use the same ones.
    """

    def __init__(self, form: RowForm, capacity: int) -> None:
        self._form = form
        self._leaves = form.make_rows(capacity)

    def write(self, slots: Slots, leaves: Sequence[np.ndarray]) -> None:
        """Copy leaves [n, ...] into n rows."""
        for mine, leaf in zip(self._leaves, leaves, strict=True):
            mine[slots] = leaf

    def read(self, slots: Slots) -> PyTree:
        """Return n rows as new trajectories, leaves [n, ...]."""
        if isinstance(slots, slice):
            return self._form.to_tree([leaf[slots].copy() for leaf in self._leaves])
        found = self._form.make_rows(len(slots))
        for leaf, to in zip(self._leaves, found, strict=True):
            # With "raise" NumPy would copy twice; these numbers are our own.
            np.take(leaf, slots, axis=0, out=to, mode="clip")
        return self._form.to_tree(found)


def finite_rows(leaves: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return which rows have no NaN and no infinity in any leaf: bool [count]."""
    is_finite = np.ones(count, bool)
    for leaf in leaves:
        size = math.prod(leaf.shape[1:])
        is_finite &= np.isfinite(leaf.reshape(count, size)).all(axis=1)
    return is_finite


def _dtype_of(leaf: Any) -> np.dtype:
    return np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def _holds_numbers(dtype: np.dtype) -> bool:
    # Of JAX: it knows the kinds of `ml_dtypes`, too. A learner can place no others.
    return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def _sizes(shape: Sequence[Any]) -> str:
    return ",".join(map(str, shape))


def _first_other_count(
    names: Sequence[str], leaves: Sequence[np.ndarray]
) -> str | None:
    """Say which leaf has another first axis than the first leaf, or an empty one."""
    for name, leaf in zip(names, leaves, strict=True):
        if len(leaf) != len(leaves[0]):
            other = f"`{names[0]}` has {len(leaves[0])}"
            return f"`{name}` has {len(leaf)} rows, and {other}"
        if len(leaf) == 0:
            return f"`{name}` must have at least one row, got none"
    return None
