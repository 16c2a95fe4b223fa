"""Look for a message again and again, while messages come quickly, before sleeping.

To sleep until a message comes, and to be woken by it, costs more than all the rest of a
small call: without this, calls between two cores take three times as long. So when the
last message came within `SHORT_S`, the wait for the next one begins with looks, for at
most as long. Its cost for others is bounded:

- After each look it lets go of the processor (`sched_yield`); looks themselves let go
  of the interpreter's lock.
- Where no message comes any more, the looks end after `SHORT_S`, for good.
- If others had the processor for longer than `_AWAY_S`, they need it. The system
  favours threads that slept, so the next 64 waits sleep at once; the next 128 if that
  happens again before 64 waits went well, and so on.
"""

import os
import time
from collections.abc import Callable

SHORT_S = 200e-6
_AWAY_S = 1e-3
_SHORTEST_PAUSE = _ENOUGH_WENT_WELL = 64
_LONGEST_PAUSE = 4096  # in waits, like the others

_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class AdaptiveSpin:
    """Wait that looks first if the last one was short; one thread at a time waits.

    >>> looks = iter([False, False, True])
    >>> spin = AdaptiveSpin(lambda timeout_s: next(looks), now_s=lambda: 0.0)
    >>> spin.begin(0.0)  # nothing is known yet: sleep at once
    >>> spin.end(0.0)
    >>> spin.begin(0.0)  # the last wait was short: look three times
    >>> next(looks, "none left")
    'none left'
    """

    def __init__(
        self,
        look: Callable[[float], object],
        *,
        now_s: Callable[[], float] = time.monotonic,
        let_others: Callable[[], None] = _yield,
    ) -> None:
        """Begin without a wait.

        Args:
          look: `look(0)` returns at once, true if there is a message.
          now_s: Returns the time.
          let_others: Yields the processor to others that wait for it.
        """
        self._look = look
        self._now_s = now_s
        self._let_others = let_others
        self._was_short = False
        self._pause_left = 0
        self._pause = _SHORTEST_PAUSE
        self._num_well = _ENOUGH_WENT_WELL

    def begin(self, started_s: float) -> None:
        """Return when a message is there, or when it is time to sleep for it.

        Args:
          started_s: The time now.
        """
        if not self._was_short:
            return
        if self._pause_left:
            self._pause_left -= 1
            return
        look, now = self._look, self._now_s
        while not look(0):
            looked_s = now()
            if looked_s - started_s > SHORT_S:
                break
            self._let_others()
            if now() - looked_s > _AWAY_S:
                self._begin_pause()
                return
        self._num_well += 1

    def end(self, started_s: float) -> None:
        """Note that the message of the wait that began then has arrived."""
        self._was_short = self._now_s() - started_s < SHORT_S

    def _begin_pause(self) -> None:
        """Sleep at once for a while: others need the processor."""
        if self._num_well < _ENOUGH_WENT_WELL:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = _SHORTEST_PAUSE
        self._pause_left = self._pause
        self._num_well = 0
