"""Go on without numbers that cannot be written: a full disk ends no run."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from replicator.writers.writer import Writer

_log = logging.getLogger(__name__)


class Forgiving:
    """Hand rows to a writer; of those that it has no room for, keep the count.

    An `OSError` is logged, once; how many rows were lost is said at the end. A writer
    that cannot be opened is opened with the first row that there is room for.

    Args:
      open_writer: Makes the writer.
    """

    def __init__(self, open_writer: Callable[[], Writer]):
        self._open = open_writer
        self._writer: Writer | None = None
        self._lost = 0
        self._told = False
        self._hangs = False
        with contextlib.suppress(OSError):  # told when there is a row to lose
            self._writer = open_writer()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the numbers of one step, or count them as lost."""
        if not self._forgiven("write", step, scalars):
            self._lost += 1

    def flush(self) -> None:
        """Return when all that could be written can be read."""
        self._forgiven("flush")

    def close(self) -> None:
        """Close the writer, and say how many rows are lost."""
        self._forgiven("close")
        if self._lost:
            _log.warning("%d rows of metrics could not be written.", self._lost)
            self._lost = 0

    def _forgiven(self, method: str, *arguments: Any) -> bool:
        """Open the writer, if it is not open, and call it; return whether that went."""
        if self._hangs:  # each try would hold up the run for as long again
            return False
        try:
            self._writer = self._writer or self._open()
            getattr(self._writer, method)(*arguments)
        except OSError as failure:
            self._hangs = isinstance(failure, TimeoutError)
            if not self._told:
                self._told = True
                _log.warning("Metrics are lost, and the run goes on: %s", failure)
            return False
        return True
