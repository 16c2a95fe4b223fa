"""Waiting in a handler, at most as long as a caller waits for its reply.

A handler that goes on after its caller's deadline answers nobody. One that gives up a
little before can still name the condition it waited for.
"""

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
