"""Report the check of a run's first updates, and record which programs passed."""

import dataclasses
import os

import jax

from replicator.engine.first_update.check import (
    UPDATES,
    CheckedUpdate,
    FirstUpdateCheck,
)
from replicator.errors import check_flags
from replicator.monitoring.events import EventLog
from replicator.monitoring.run_record import first_updates, note_first_update

SWITCH = "REPLICATOR_CHECK_FIRST_UPDATES"
"""Environment variable; `0` turns the check off by default."""


def first_update_check(
    wanted: bool | None,
    *,
    directory: str | os.PathLike[str] | None,
    events: EventLog | None,
) -> FirstUpdateCheck | None:
    """Return the check of a run's first updates; None for no check.

    >>> first_update_check(False, directory=None, events=None) is None
    True

    Args:
      wanted: Choice of the user; None leaves it to the environment.
      directory: Directory of the run's record, which lists the programs checked before.
      events: Journal of the run.

    Raises:
      ArgumentError: `wanted` is neither True, False nor None.
    """
    if wanted is None:
        wanted = os.environ.get(SWITCH, "1") != "0"
    check_flags(check_first_updates=wanted)
    if not wanted:
        return None

    def is_known(key: str) -> bool:
        known = first_updates(directory) if directory is not None else {}
        return known.get(key, {}).get("update") == UPDATES

    def report(checked: CheckedUpdate) -> None:
        if directory is None or events is None or jax.process_index() > 0:
            return
        events.write("first_update", **dataclasses.asdict(checked))
        if checked.result != "differs":
            note_first_update(directory, dataclasses.asdict(checked))

    return FirstUpdateCheck(is_known=is_known, report=report)
