"""The journal of a run, and the handling of record files that cannot be written."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from replicator.errors import ArgumentError
from replicator.monitoring.events import EventLog

_log = logging.getLogger(__name__)


def open_journal(directory: str | os.PathLike[str] | None) -> EventLog | None:
    """Open this process's journal of a run; None if the run has no directory.

    >>> open_journal(None) is None
    True

    Raises:
      ArgumentError: The directory cannot be made.
    """
    if directory is None:
        return None
    with written(directory, is_fresh=True):
        return EventLog(directory, process=jax.process_index())


@contextmanager
def written(directory: str | os.PathLike[str], *, is_fresh: bool) -> Iterator[None]:
    """Refuse to begin a run without its records; a resumed run only logs a warning."""
    try:
        yield
    except OSError as failure:
        if not is_fresh:
            _log.warning("The run goes on without all of its records: %s", failure)
            return
        raise ArgumentError(
            f"`directory` must be one that can be written to, got {directory}: "
            f"{failure}. Choose another, or change its permissions."
        ) from failure
