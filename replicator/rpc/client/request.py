"""A call as its client remembers it, through all of its tries."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from replicator.base.types import PyTree
from replicator.rpc.codec.no_argument_calls import NoArgumentCall

Body: TypeAlias = Sequence[PyTree]
"""Value of a CALL message: method, arguments, those by name, timeout."""

_new_tuple = tuple.__new__  # a named one at half the price


def body_of(
    method: str,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    timeout_s: float | None,
) -> Body:
    """Return the value of a CALL message, in the form that is shortest to send.

    >>> body_of("add", [3], {}, 60.0)
    ['add', [3], None, 60.0]
    """
    if args or kwargs:
        return [method, [*args] or None, {**kwargs} or None, timeout_s]
    return _new_tuple(NoArgumentCall, (method, None, None, timeout_s))


class Request:
    """A call with its deadline and the number of its tries.

    Attributes:
      call_id: Number of the call, the same in each try.
      method: Name of the method.
      started_s: Time at which it was made.
      deadline_s: Time from which it is late; infinite if it has no deadline.
      attempts: Number of tries so far.
    """

    def __init__(
        self, call_id: int, body: Body, *, started_s: float, deadline_s: float
    ) -> None:
        self.call_id = call_id
        self.method: str = body[0]
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.attempts = 0
        self._body = body

    @property
    def remaining_s(self) -> float:
        """Return the seconds until the deadline; infinite without one."""
        return self.deadline_s - time.monotonic()

    @property
    def timeout_s(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None without one."""
        if self.deadline_s == math.inf:
            return None
        return max(0.0, self.remaining_s)

    @property
    def waited_s(self) -> float:
        """Return how long ago it was made."""
        return time.monotonic() - self.started_s

    def body(self) -> Body:
        """Return the value of its message, with the time that is left now."""
        # The server starts its own clock: it is sent the time that is left, not a date.
        return [*self._body[:3], self.timeout_s] if self.attempts else self._body
