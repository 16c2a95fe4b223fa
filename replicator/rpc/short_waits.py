"""Look for a message again and again, while messages come quickly, before sleeping.

To sleep until a message comes, and to be woken by it, costs 20 to 40 µs at each end:
more than all else that a small call does. So when the last message came within
`SHORT_S`, the wait for the next one begins with looks, for at most as long. What that
may cost others is bounded:

- Each look lets go of the interpreter's lock and of the processor (`sched_yield`).
- Where no message comes any more, the looks end after `SHORT_S`, for good.
- A look that took longer than `_AWAY_S` tells that others need the processor, or the
  lock. Who sleeps comes first then, so the next 64 waits sleep at once; the next 128 if
  that happens again before 64 waits went well, and so on.
"""

import os
import time
from collections.abc import Callable
from typing import final

SHORT_S = 200e-6
_AWAY_S = 50e-6
_FEWEST_SLEPT = _ENOUGH_WENT_WELL = 64
_MOST_SLEPT = 4096

_let_others = getattr(os, "sched_yield", lambda: None)


@final
class ShortWaits:
    """Remembers how long the waits at one place were; one thread at a time waits."""

    __slots__ = (
        "_look",
        "_now_s",
        "_num_slept",
        "_num_to_sleep",
        "_num_well",
        "_was_short",
    )

    def __init__(
        self,
        look: Callable[[float], object],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with none.

        Args:
          look: `look(0)` returns at once, with something true if there is a message.
          now_s: Where times come from.
        """
        self._look = look
        self._now_s = now_s
        self._was_short = False
        self._num_to_sleep = 0
        self._num_slept = _FEWEST_SLEPT
        self._num_well = _ENOUGH_WENT_WELL

    def begin(self, started_s: float) -> None:
        """Return when a message is there, or when it is time to sleep for it.

        Args:
          started_s: Now.
        """
        if not self._was_short:
            return
        if self._num_to_sleep:
            self._num_to_sleep -= 1
            return
        look, now, last_s = self._look, self._now_s, started_s
        while True:
            is_there = look(0)
            now_s = now()
            if now_s - last_s > _AWAY_S:
                self._make_room()
                return
            if is_there or now_s - started_s > SHORT_S:
                self._num_well += 1
                return
            last_s = now_s
            _let_others()

    def end(self, started_s: float) -> None:
        """Note that the message that was waited for since then is there."""
        self._was_short = self._now_s() - started_s < SHORT_S

    def _make_room(self) -> None:
        """Sleep at once for a while: others need what looking takes."""
        if self._num_well < _ENOUGH_WENT_WELL:
            self._num_slept = min(2 * self._num_slept, _MOST_SLEPT)
        else:
            self._num_slept = _FEWEST_SLEPT
        self._num_to_sleep = self._num_slept
        self._num_well = 0
