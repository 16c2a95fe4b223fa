"""Go on without numbers that cannot be written, for example to a full disk."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from replicator.writers.writer import Writer

_log = logging.getLogger(__name__)


class Forgiving:
    """Pass rows to a writer; count those that it cannot write.

    An `OSError` is logged once, the number of lost rows at the end. A writer that
    cannot be opened is opened with the first row that can be written.

    Args:
      open_writer: Returns the writer.
    """

    def __init__(self, open_writer: Callable[[], Writer]):
        self._open = open_writer
        self._writer: Writer | None = None
        self._lost = 0
        self._is_logged = False
        self._hangs = False
        with contextlib.suppress(OSError):  # logged when there is a row to lose
            self._writer = open_writer()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the numbers of one step, or count them as lost."""
        if not self._forgiven("write", step, scalars):
            self._lost += 1

    def flush(self) -> None:
        """Return when all that could be written can be read."""
        self._forgiven("flush")

    def close(self) -> None:
        """Close the writer, and log the number of lost rows."""
        self._forgiven("close")
        if self._lost:
            _log.warning("%d rows of metrics could not be written.", self._lost)
            self._lost = 0

    def _forgiven(self, method: str, *arguments: Any) -> bool:
        """Open the writer, if it is not open, and call it; return if that succeeded."""
        if self._hangs:  # each try would hold up the run for as long again
            return False
        try:
            self._writer = self._writer or self._open()
            getattr(self._writer, method)(*arguments)
        except OSError as failure:
            self._hangs = isinstance(failure, TimeoutError)
            if not self._is_logged:
                self._is_logged = True
                _log.warning("Metrics are lost, and the run goes on: %s", failure)
            return False
        return True
