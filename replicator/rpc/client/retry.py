"""When a call is sent again, and after how long: decided here, done in `client`.

A call that surely did not run is sent again whatever it is. One that may have run is
sent again only if its method is idempotent. All within the call's deadline, with
back-off from 10 ms to 1 s, and jitter: a thousand clients of a server that comes back
do not come back in step. Each wait is a tenth longer than the one before it, so about a
tenth of all that was waited: no client comes much later than its server. (Where waits
double, it may come as late again as its server.)
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

_FIRST_DELAY_S = 0.01
_GROWTH = 1.1
_LONGEST_DELAY_S = 1.0


class TryOutcome(enum.Enum):
    """Reason why a try has no answer."""

    UNREACHABLE = "nobody was there"
    """No connection; nothing was sent."""
    REFUSED = "it was not run"
    """The server stops, or the connection broke before the call was sent whole."""
    LOST = "it may have run"
    """The connection broke after that."""
    UNKNOWN = "the server does not know it"
    """The server lives and neither runs nor holds the call: its request or its reply
    was lost on the way."""
    LATE = "no answer came within the deadline"


class Again(NamedTuple):
    """Send it again after a while."""

    delay_s: float


class GiveUp(NamedTuple):
    """Raise what happened."""


class OutOfTime(NamedTuple):
    """Raise that the deadline came first."""


def decide(
    outcome: TryOutcome,
    *,
    attempt: int,
    remaining_s: float,
    is_idempotent: bool,
    wait_for_ready: bool,
    random: Callable[[], float],
) -> Again | GiveUp | OutOfTime:
    """Return what follows a try that got no answer.

    Args:
      outcome: Reason why it has none.
      attempt: Number of tries before it.
      remaining_s: Seconds until the call's deadline; infinite if it has none.
      is_idempotent: Whether the method may run twice.
      wait_for_ready: Whether a call waits for a server that is not there.
      random: Returns a number from 0 to 1.

    >>> call = {"attempt": 0, "remaining_s": 60.0, "wait_for_ready": True}
    >>> decide(TryOutcome.LOST, **call, is_idempotent=False, random=lambda: 1.0)
    GiveUp()
    >>> decide(TryOutcome.LOST, **call, is_idempotent=True, random=lambda: 1.0)
    Again(delay_s=0.01)
    """
    # First: a call past its deadline is never sent again.
    if outcome is TryOutcome.LATE:
        return OutOfTime()
    if outcome in (TryOutcome.LOST, TryOutcome.UNKNOWN):
        may_try = is_idempotent
    else:
        # A link that broke unnoticed is no evidence that the server is gone.
        may_try = wait_for_ready or (outcome is TryOutcome.REFUSED and attempt == 0)
    if not may_try:
        return GiveUp()
    if remaining_s <= 0:
        return OutOfTime()
    return Again(min(delay_s(attempt, random), remaining_s))


def delay_s(attempt: int, random: Callable[[], float]) -> float:
    """Return how long to wait after try number `attempt` (from 0).

    >>> [delay_s(attempt, lambda: 1.0) for attempt in (0, 1, 100)]
    [0.01, 0.011000000000000001, 1.0]
    """
    # The exponent has a limit, as a float has.
    longest_s = min(_FIRST_DELAY_S * _GROWTH ** min(attempt, 64), _LONGEST_DELAY_S)
    return longest_s * (0.5 + 0.5 * random())
