"""Argument rules of the methods of a table, which a learner's methods forward to."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicator.base import accepts as rules
from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories.table import Cut, TrajectoryError

MOST_EPISODES = 65_536
"""Most returns of episodes in one insert, and kept until a batch is taken."""
_MOST_NODES = 4_096
_NAME = rules.text()
_NUMBER = rules.whole(-(1 << 63))
_RETURNS = rules.items("numbers", rules.is_number, MOST_EPISODES)
_ARRAY = rules.array("f", MOST_EPISODES)
_ACTORS = rules.texts(_MOST_NODES)
_ORDER = rules.plain(2 * _MOST_NODES, most_text=1 << 24)


def _is_rows(value: PyTree) -> bool:
    left = _MOST_NODES

    def look(node: PyTree) -> bool:
        nonlocal left
        is_named = type(node) is not np.ndarray and isinstance(node, Mapping)
        inside = len(node) if is_named or isinstance(node, (list, tuple)) else 0
        left -= 1
        if left < inside or (is_named and not all(map(_is_key, node))):
            raise ValueError
        return False

    try:
        leaves = jax.tree.leaves(value, is_leaf=look)
    except ValueError:  # by JAX: keys that cannot be sorted
        return False
    return all(rules.is_array(leaf) or isinstance(leaf, int | float) for leaf in leaves)


def _is_key(key: Any) -> bool:
    return _NAME.is_right(key) or _NUMBER.is_right(key)


ROWS = rules.ArgumentRule(
    f"a pytree of arrays, of at most {_MOST_NODES} nodes, with names of at most "
    f"{rules.MAX_NAME} characters",
    _is_rows,
)


def _is_cut(value: Any) -> bool:
    return value is None or (
        isinstance(value, Cut)
        and rules.whole().is_right(value.batch)
        and isinstance(value.snapshots, dict)
        and isinstance(value.order, dict | None)
        and _ACTORS.is_right([*value.snapshots])
        and _ORDER.is_right(value.order)
        and all(isinstance(held, bytes | None) for held in value.snapshots.values())
    )


INSERT_RULES = {
    "trajectories": ROWS._replace(remedy="Change what this actor inserts."),
    "actor": rules.text(),
    # A learner's batches have them as int32.
    "version": rules.whole(0, (1 << 31) - 1)._replace(
        remedy="Pass that of the variables it acted with."
    ),
    "number": _NUMBER,
    "snapshot": rules.blob(1 << 30)._replace(remedy="Pass None for none."),
    "episodes": _RETURNS._replace(
        # An array as well, as gymnasium gives them.
        is_right=lambda value: _RETURNS.is_right(value) or _ARRAY.is_right(value)
    ),
}
INSERT = rules.accepts(TrajectoryError, "actor", **INSERT_RULES)
TURN = rules.accepts(actor=rules.text())
TAKE = rules.accepts(
    count=rules.whole(1, (1 << 31) - 1),
    oldest=_NUMBER,
    newest=_NUMBER,
    timeout_s=rules.seconds(),
)
BEGIN = rules.accepts(
    cut=rules.ArgumentRule("None, or a cut that a table returned", _is_cut)
)
STATISTICS = rules.accepts()


def check_snapshot(actor: str, snapshot: bytes | None, most: int) -> None:
    """Raise if a snapshot has more bytes than a table has for each.

    Raises:
      TrajectoryError: The snapshot is too large.

    >>> check_snapshot("actor/0", b"abc", most=2)
    Traceback (most recent call last):
    replicator...TrajectoryError: `snapshot` of actor/0 must have at most 2 bytes, ...
    """
    if snapshot is not None and len(snapshot) > most:
        raise TrajectoryError(
            f"`snapshot` of {actor} must have at most {most} bytes, got "
            f"{len(snapshot)}. Give the table more `snapshot_bytes`."
        )


def check_batch_fits(count: int, capacity: int) -> None:
    """Raise an `ArgumentError` if a table has room for less than a sample."""
    if count > capacity:
        raise ArgumentError(
            f"`capacity` must be at least {count}, for samples of {count} "
            f"(`batch_size` x `samples_per_call`), got {capacity}. Use {4 * count}."
        )


def check_same_batch(count: int, batch_size: int) -> None:
    """Raise an `ArgumentError` if a batch is not of the table's size."""
    if count != batch_size:
        raise ArgumentError(
            f"`count` must be `batch_size`, got {count} for {batch_size}. Use "
            f"{batch_size}."
        )
