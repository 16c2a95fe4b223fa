"""Tell what came of the check of a run's first updates, and remember it."""

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
"""The environment variable that says `0` where no run is to check them by itself."""


def first_update_check(
    wanted: bool | None,
    *,
    directory: str | os.PathLike[str] | None,
    events: EventLog | None,
) -> FirstUpdateCheck | None:
    """Return how a run checks its first updates; None if it does not.

    Args:
      wanted: What its user says; None leaves it to the environment.
      directory: Holds the run's record, which knows the programs that were checked.
      events: The journal.

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

    def tell(told: CheckedUpdate) -> None:
        if directory is None or events is None or jax.process_index() > 0:
            return
        events.write("first_update", **dataclasses.asdict(told))
        if told.result != "differs":
            note_first_update(directory, dataclasses.asdict(told))

    return FirstUpdateCheck(is_known=is_known, report=tell)
