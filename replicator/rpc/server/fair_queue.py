"""Queue of calls in which clients take turns, so that one that floods starves no other.

A client whose calls hold `max_seats` at once waits until one of them is over, which is
when its reply was sent: a client that does not read takes no more threads than that.
The last `reserved` seats are for clients that hold next to none: whose calls wait, for
room or for news, leaves seats to those that bring it.
"""

import collections
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

_FEW_SEATS = 2  # of a client, to which the reserved ones are open

_Source = TypeVar("_Source", bound=Hashable)
_Call = TypeVar("_Call")


class FairQueue(Generic[_Source, _Call]):
    """Calls in the order of their client, clients in turn; its owner holds a lock."""

    def __init__(self, *, max_seats: int, reserved: int = 0) -> None:
        self.reserved = reserved
        self._max_seats = max_seats
        # The next client comes first; one of which a call was taken goes to the end.
        self._calls: dict[_Source, collections.deque[_Call]] = {}
        self._seats: collections.Counter[_Source] = collections.Counter()

    def __bool__(self) -> bool:
        """Return whether a call waits; any thread may call this."""
        return bool(self._calls)

    def __iter__(self):
        """Iterate over all calls that wait."""
        return itertools.chain.from_iterable(self._calls.values())

    def put(self, source: _Source, call: _Call) -> None:
        """Let a call wait.

        >>> queue = FairQueue(max_seats=2)
        >>> for source, call in [("a", 1), ("a", 2), ("b", 3)]:
        ...     queue.put(source, call)
        >>> [queue.take(4), queue.take(3), queue.take(2)]
        [('a', 1), ('b', 3), ('a', 2)]
        """
        self._calls.setdefault(source, collections.deque()).append(call)

    def take(self, num_free: int) -> tuple[_Source, _Call] | None:
        """Return the next call, which has a seat until `done`; None if none may run.

        Args:
          num_free: Number of free seats, with the one that is to be taken.
        """
        most = self._max_seats if num_free > self.reserved else _FEW_SEATS
        for source, calls in self._calls.items():
            if self._seats[source] < min(most, self._max_seats):
                self._seats[source] += 1
                del self._calls[source]
                call = calls.popleft()
                if calls:
                    self._calls[source] = calls
                return source, call
        return None

    def done(self, source: _Source) -> None:
        """Give back the seat of a call."""
        self._seats[source] -= 1
        if not self._seats[source]:
            del self._seats[source]

    def drop(self, source: _Source) -> list[_Call]:
        """Take out all calls of a client that wait; return them."""
        return list(self._calls.pop(source, ()))
