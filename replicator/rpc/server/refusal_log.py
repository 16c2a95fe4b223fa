"""Log refused clients, at a limited rate."""

import logging
import threading
import time
from collections.abc import Callable

_BETWEEN_S = 1.0


class RefusalLog:
    """Warns of refused clients, once a second at most."""

    def __init__(
        self,
        server: str,
        log: logging.Logger,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no warning logged.

        Args:
          server: Name of the server that refuses.
          log: Logger of the warnings.
          clock: Returns seconds that only grow.
        """
        self._server = server
        self._log = log
        self._clock = clock
        # Guards the two numbers. The log is written outside: its handlers may block.
        self._lock = threading.Lock()
        self._next_s = -float("inf")
        self._num_unlogged = 0

    def warn(self, reason: Exception) -> None:
        """Warn of one more, or count it for the next warning."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s:
                self._num_unlogged += 1
                return
            unlogged, self._num_unlogged = self._num_unlogged, 0
            self._next_s = now_s + _BETWEEN_S
        # A thread that comes meanwhile counts for the next second.
        others = f" ({unlogged} others were refused before it)" if unlogged else ""
        self._log.warning("%s refused a client: %s%s", self._server, reason, others)
