"""Waiting in a handler: no longer than somebody waits for its answer.

A handler that goes on after its caller's deadline answers nobody. One that gives up a
little before can still say what it waited for.
"""

import threading
import time
from collections.abc import Callable

from replicator.rpc.server.served_call import current_call

LONGEST_S = 60.0
"""How long is waited where no call by RPC says it."""
_LOOK_S = 0.25  # how often a handler looks whether anybody waits for it
_ANSWER_S = 0.5  # kept, of a deadline, for the way back; of a short one a quarter


def wait_for(
    changed: threading.Condition,
    is_ready: Callable[[], bool],
    *,
    timeout_s: float | None = None,
) -> bool:
    """Wait until `is_ready`; return False when there is no use in waiting longer.

    That is: the time is over, the deadline of the call that this thread runs comes
    near, its caller is gone, or its server stops.

    Args:
      changed: Held by this thread; notified when `is_ready` may have changed.
      is_ready: Asked while `changed` is held.
      timeout_s: Longest wait; the call's deadline alone by default.
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
        # Only the condition wakes it, and who gives a call up does not know that.
        changed.wait(min(left, _LOOK_S))
        if call is not None and call.is_cancelled():
            return False
    return True
