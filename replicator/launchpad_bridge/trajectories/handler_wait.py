"""Waiting in a handler, at most as long as a caller waits for its reply.

A handler that goes on after its caller's deadline answers nobody. One that gives up a
little before can still name the condition it waited for.
"""

import collections
import threading
import time
from collections.abc import Callable

from replicator.rpc.server.served_call import current_call

LONGEST_S = 60.0
"""Longest wait outside of a remote call, which has a deadline of its own."""
_LOOK_S = 0.25  # between two checks that the caller still waits
_ANSWER_S = 0.5  # part of a deadline kept for the reply; a quarter of a short one


def wait_for(
    changed: threading.Condition,
    is_ready: Callable[[], bool],
    *,
    timeout_s: float | None = None,
) -> bool:
    """Wait until `is_ready`; return False if waiting longer is of no use.

    That is if the time is over, the deadline of the call that this thread runs comes
    near, its caller is gone, or its server stops.

    Args:
      changed: Held by this thread; notified when `is_ready` may have changed.
      is_ready: Called while `changed` is held.
      timeout_s: Longest wait; bounded by the call's deadline alone by default.

    >>> changed = threading.Condition()
    >>> with changed:
    ...     wait_for(changed, lambda: False, timeout_s=0)
    False
    """
    call = current_call()
    remaining_s = call.remaining_s() if call is not None else LONGEST_S
    left_s = [] if timeout_s is None else [timeout_s]
    if remaining_s is not None:
        left_s.append(remaining_s - min(_ANSWER_S, remaining_s / 4))
    until_s = time.monotonic() + min(left_s, default=threading.TIMEOUT_MAX)
    while not is_ready():
        left = until_s - time.monotonic()
        if left <= 0:
            return False
        # A caller that gives up notifies no condition, so the wait looks for itself.
        changed.wait(min(left, _LOOK_S))
        if call is not None and call.is_cancelled():
            return False
    return True


class WaitingLine:
    """Calls that wait for one condition, first come, first served.

    Otherwise those that need much starve. All methods are called while `changed` is
    held.

    Attributes:
      waited_s: Seconds that calls waited so far.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """Begin with nobody; `changed` is notified when a call may go on."""
        self.waited_s = 0.0
        self._changed = changed
        self._tickets: collections.deque[object] = collections.deque()

    def __len__(self) -> int:
        """Return the number of calls that wait."""
        return len(self._tickets)

    def wait(self, is_ready: Callable[[bool], bool]) -> tuple[bool, float]:
        """Wait at the end of the line, as `wait_for`.

        Args:
          is_ready: Takes whether this call is the first one.

        Returns:
          Whether it is ready; and the seconds that it waited.
        """
        ticket, started_s = object(), time.monotonic()
        self._tickets.append(ticket)
        try:
            found = wait_for(
                self._changed, lambda: is_ready(self._tickets[0] is ticket)
            )
        finally:
            self._tickets.remove(ticket)
            self._changed.notify_all()  # another one is the first now
            waited_s = time.monotonic() - started_s
            self.waited_s += waited_s
        return found, waited_s
