"""Take the rows of a checkpoint into a replay table, by the door of all others."""

import jax
import numpy as np

from replicator.errors import CheckpointMismatchError
from replicator.launchpad_bridge.replay.held_rows import HeldRows, SavedRows
from replicator.launchpad_bridge.replay.row_copies import RowCopies
from replicator.launchpad_bridge.trajectories.row_checks import RowChecks
from replicator.launchpad_bridge.trajectories.table import TrajectoryError


def restore(
    saved: SavedRows, checks: RowChecks, rows: HeldRows, copies: RowCopies
) -> tuple[np.ndarray, int]:
    """Take in rows of a checkpoint, in pieces of at most a table.

    Returns:
      Their places, int64 [n], -1 where the table's rules skip a row; and how many rows
      went to make room.

    Raises:
      CheckpointMismatchError: They are of another form.
    """
    found, removed = np.full(len(saved.keys), -1), 0
    size = len(rows.keys)
    for first in range(0, len(found), size):
        part = np.arange(first, min(first + size, len(found)))
        trajectories, *records = jax.tree.map(
            lambda leaf, part=part: leaf[part], tuple(saved)
        )
        try:
            memory, leaves = checks.check(
                trajectories,
                actor="checkpoint_dir",
                fits=lambda count: None,
                beside=[part, *records],
            )
        except TrajectoryError as error:
            raise CheckpointMismatchError(
                f"`checkpoint_dir` must hold rows of this table's form, got others: "
                f"{error} Or choose another directory."
            ) from error
        *leaves, part, keys, versions, priorities, times = leaves
        slots, gone = rows.reserve(len(part))
        memory.write(slots, leaves)
        copies.memory = memory
        rows.restore(slots, SavedRows((), keys, versions, priorities, times))
        found[part] = slots
        removed += gone
    return found, removed
