"""Say which clients were refused, and not for each of a flood of them."""

import logging
import threading
import time
from collections.abc import Callable
from typing import final

_BETWEEN_S = 1.0


@final
class RefusalLog:
    """Warns of refused clients, once a second at most."""

    def __init__(
        self,
        server: str,
        log: logging.Logger,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing told.

        Args:
          server: Who refuses.
          log: Where it is told.
          clock: Seconds that only grow.
        """
        self._server = server
        self._log = log
        self._clock = clock
        # Guards the two numbers. The log is written outside: its handlers may block.
        self._lock = threading.Lock()
        self._next_s = -float("inf")
        self._untold = 0

    def tell(self, reason: Exception) -> None:
        """Warn of one more, or count it to be told with the next warning."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s:
                self._untold += 1
                return
            untold, self._untold = self._untold, 0
            self._next_s = now_s + _BETWEEN_S
        others = f" ({untold} others were refused before it)" if untold else ""
        self._log.warning("%s refused a client: %s%s", self._server, reason, others)
