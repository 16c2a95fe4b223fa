"""Form of all trajectories of a table, and memory for a fixed number of them.

A row is one trajectory: a leaf of it has the shape of an inserted leaf without the
first axis.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicator.base.trees import first_difference, named_leaves
from replicator.base.types import PyTree
from replicator.inputs.checks import holds_numbers
from replicator.launchpad_bridge.trajectories.table import TrajectoryError
from replicator.rpc.server.reply_arrays import reply_arrays


class RowForm:
    """Structure, shapes and dtypes of a trajectory.

    Attributes:
      names: Paths of the leaves.
    """

    def __init__(self, like: PyTree) -> None:
        """Take the form of one trajectory.

        Args:
          like: Leaves without the first axis, arrays or `jax.ShapeDtypeStruct`s.
        """
        named = named_leaves(like)
        self.names = tuple(name for name, _ in named)
        self._rows = [(np.shape(leaf), _dtype_of(leaf)) for _, leaf in named]
        self._structure = jax.tree.structure(like)

    def check(self, trajectories: PyTree, actor: str) -> list[np.ndarray]:
        """Return the leaves of trajectories that have this form.

        Args:
          trajectories: Leaves [n, ...].
          actor: Actor that inserts them.

        Raises:
          TrajectoryError: They have another form, or leaves of different n; it names
            actor and leaf.

        >>> form = RowForm({"reward": np.zeros(20, np.float32)})
        >>> [leaf] = form.check({"reward": np.ones((2, 20), np.float32)}, "actor/0")
        >>> leaf.shape
        (2, 20)
        """
        found, structure = jax.tree.flatten(trajectories)
        leaves = [np.asarray(leaf) for leaf in found]
        count = len(leaves[0]) if leaves and leaves[0].ndim else 1
        given = [(leaf.shape, leaf.dtype) for leaf in leaves]
        due = self.rows(count)
        wrong = None if count else "there must be at least one row, got none"
        if structure != self._structure or given != due:
            blank = [
                np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in due
            ]
            wrong = first_difference(
                self.to_tree(blank), jax.tree.unflatten(structure, leaves)
            )
        if wrong:
            raise TrajectoryError(
                f"`trajectories` of {actor} must have the form of the first ones: "
                f"{wrong}. Change what this actor inserts."
            )
        return leaves

    def is_inexact(self, place: int) -> bool:
        """Return whether a leaf may hold NaN: integers and booleans do not."""
        return self._rows[place][1].kind not in "iub"

    def rows(self, count: int) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return shapes and dtypes of leaves [count, ...]."""
        return [((count, *shape), dtype) for shape, dtype in self._rows]

    def make_rows(self, count: int) -> list[np.ndarray]:
        """Return new leaves [count, ...], not initialised."""
        return [np.empty(*form) for form in self.rows(count)]

    def to_tree(self, leaves: Sequence[np.ndarray]) -> PyTree:
        """Return leaves as trajectories."""
        return jax.tree.unflatten(self._structure, leaves)


def form_of(trajectories: PyTree, actor: str) -> RowForm:
    """Return the form of the first trajectories; `RowForm.check` comes next.

    Args:
      trajectories: Leaves [n, ...].
      actor: Actor that inserts them.

    Raises:
      TrajectoryError: They are not arrays with at least one row.
    """
    named = [(name, np.asarray(leaf)) for name, leaf in named_leaves(trajectories)]
    wrong = None if named else "there is no array in them"
    for name, leaf in named:
        if leaf.shape[:1] in ((), (0,)):
            wrong = f"`{name}` must have a first axis, of one trajectory or more"
        elif not holds_numbers(leaf.dtype):
            wrong = f"`{name}` must hold numbers, got {leaf.dtype}"
    if wrong:
        raise TrajectoryError(
            f"`trajectories` of {actor} must be arrays, one row for each: {wrong}. "
            "Change what this actor inserts."
        )
    return RowForm(jax.tree.map(lambda leaf: np.asarray(leaf)[0], trajectories))


class RowMemory:
    """Memory for a fixed number of trajectories, as long as its table lives.

    It has no lock: its table must let no two threads use the same rows.

    Args:
      form: Form of all trajectories.
      capacity: Number of rows.
      finite: Leaves that were checked, and found finite, before they are written.
    """

    def __init__(self, form: RowForm, capacity: int, finite: Sequence[int]) -> None:
        self._form = form
        self._finite = finite
        self._leaves = form.make_rows(capacity)

    def write(self, slots: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Copy leaves [n, ...] into n rows, int64 [n]."""
        for place, mine in enumerate(self._leaves):
            mine[slots] = leaves[place]
            # Shared memory: its sender may have changed it since it was checked.
            if place in self._finite:
                mine[slots] = np.where(np.isfinite(mine[slots]), mine[slots], 0)

    def read(self, slots: np.ndarray) -> PyTree:
        """Return n rows, int64 [n], as new trajectories, leaves [n, ...]."""
        found = reply_arrays(self._form.rows(len(slots)))
        for leaf, row in zip(self._leaves, found, strict=True):
            # With "raise" NumPy would copy twice; these numbers are our own.
            np.take(leaf, slots, axis=0, out=row, mode="clip")
        return self._form.to_tree(found)


def finite_rows(leaves: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return which rows have no NaN and no infinity in any leaf: bool [count].

    >>> finite_rows([np.array([0.0, np.nan, np.inf])], count=3)
    array([ True, False, False])
    """
    is_finite = np.ones(count, bool)
    for leaf in leaves:
        size = math.prod(leaf.shape[1:])
        is_finite &= np.isfinite(leaf.reshape(count, size)).all(axis=1)
    return is_finite


def _dtype_of(leaf: Any) -> np.dtype:
    return np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
