"""A few places at the handshake, and how many wait for one."""

import threading
from typing import final


@final
class Turns:
    """Places for strangers; who has one is quicker where others wait."""

    def __init__(self, places: int) -> None:
        """Start with all of them free."""
        self._places = threading.Semaphore(places)
        self._lock = threading.Lock()
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Return how many have arrived and have no place."""
        return self._num_waiting

    def do_others_wait(self) -> bool:
        """Tell whether anybody waits."""
        return self._num_waiting > 0

    def arrive(self) -> None:
        """Note that one more waits."""
        with self._lock:
            self._num_waiting += 1

    def take(self, timeout_s: float) -> bool:
        """Wait for a place no longer than this; return whether there was one."""
        has_place = self._places.acquire(timeout=timeout_s)
        with self._lock:
            self._num_waiting -= 1
        return has_place

    def leave(self) -> None:
        """Free a place."""
        self._places.release()
