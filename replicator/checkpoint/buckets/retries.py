"""Try requests again after failures that pass, for a bounded time.

TensorStore repeats a request after 408, 429, 5xx and cut connections. This repeats the
operation where that was not enough, and after what it takes for an answer: 409, a token
that has expired, silence.
"""

import random
import re
import time
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from replicator.base.host.clock import Clock, SystemClock

Failure: TypeAlias = Literal["passing", "refused", "absent", "other"]
_T = TypeVar("_T")

LIMIT_S = 120.0
_FIRST_S, _LONGEST_S = 0.05, 5.0
_CODE = re.compile(
    r"http_response_code='(\d+)'|Failed to parse .*\"code\": ?(\d+)", re.S
)
_PASSING = re.compile(
    "(ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL|UNKNOWN)\\b"
)
_REFUSED = re.compile("PERMISSION_DENIED|UNAUTHENTICATED|Failed to get credentials")


def classify(failure: Exception) -> Failure:
    """Return what kind of failure an error of TensorStore is.

    >>> classify(ValueError("NOT_FOUND: No [http_response_code='404']"))
    'absent'
    >>> classify(ValueError("DATA_LOSS: Digest mismatch"))
    'other'
    """
    if isinstance(failure, TimeoutError):
        return "passing"
    text = str(failure)
    found = _CODE.search(text)
    code = int(found[1] or found[2]) if found else 0
    if code == 404 or text.startswith("NOT_FOUND"):
        return "absent"
    # Tokens expire with 400 (S3, where a HEAD has no room for a reason) and 401 (GCS).
    if code in (400, 401, 403) or _REFUSED.search(text):
        return "refused"
    return "passing" if code or _PASSING.match(text) else "other"


def call_again(
    call: Callable[[], _T],
    *,
    again: Callable[[Failure], bool],
    limit_s: float = LIMIT_S,
    clock: Clock | None = None,
) -> _T:
    """Return the result of a call, which is repeated while its failures pass.

    >>> call_again(lambda: 3, again=lambda failure: failure == "passing")
    3

    Args:
      call: Makes requests and waits for their answers; may be called many times.
      again: Returns whether to repeat after such a failure; may prepare for it.
      limit_s: Seconds after which no other attempt begins.
      clock: Clock of all times.

    Raises:
      ValueError: The failure of the last attempt; also `TimeoutError`.
    """
    clock = clock or SystemClock()
    ends_s = clock.now_s() + limit_s
    pause_s = _FIRST_S
    while True:
        try:
            return call()
        except (ValueError, TimeoutError) as failure:
            # Writers that failed together should not come back together.
            wait_s = pause_s * random.uniform(0.5, 1)
            if clock.now_s() + wait_s >= ends_s or not again(classify(failure)):
                raise
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
