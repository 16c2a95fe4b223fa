"""Whose call is next: clients take turns, so one that floods does not starve others.

A client whose calls hold `max_seats` at once waits until one of them is over, which is
when its reply was sent: a client that does not read takes no more threads than that.
"""

import collections
from collections.abc import Hashable
from typing import Generic, TypeVar, final

_Source = TypeVar("_Source", bound=Hashable)
_Call = TypeVar("_Call")


@final
class FairQueue(Generic[_Source, _Call]):
    """Calls in the order of their client, clients in turn; no lock of its own.

    Attributes:
      turns: Clients of which a call may run now, the next first.
    """

    def __init__(self, *, max_seats: int) -> None:
        self._max_seats = max_seats
        self._calls: dict[_Source, collections.deque[_Call]] = {}
        self.turns: collections.deque[_Source] = collections.deque()
        self._seats: dict[_Source, int] = {}

    def __iter__(self):
        """Iterate over all calls that wait."""
        return (call for calls in list(self._calls.values()) for call in list(calls))

    def put(self, source: _Source, call: _Call) -> None:
        """Let a call wait."""
        calls = self._calls.get(source)
        if calls is None:
            calls = self._calls[source] = collections.deque()
            if self._seats.get(source, 0) < self._max_seats:
                self.turns.append(source)
        calls.append(call)

    def take(self) -> tuple[_Source, _Call] | None:
        """Return the next call, which has a seat until `done`; None if none may run."""
        if not self.turns:
            return None
        source = self.turns.popleft()
        calls = self._calls[source]
        call = calls.popleft()
        self._seats[source] = self._seats.get(source, 0) + 1
        if not calls:
            del self._calls[source]
        elif self._seats[source] < self._max_seats:
            self.turns.append(source)
        return source, call

    def done(self, source: _Source) -> None:
        """Give back the seat of a call."""
        held = self._seats.pop(source)
        if held > 1:
            self._seats[source] = held - 1
        if held == self._max_seats and source in self._calls:
            self.turns.append(source)

    def drop(self, source: _Source) -> list[_Call]:
        """Take out all calls of a client that wait; return them."""
        calls = self._calls.pop(source, None)
        if calls is None:
            return []
        if self._seats.get(source, 0) < self._max_seats:
            self.turns.remove(source)
        return list(calls)
