"""Runs of dataflows: which results are computed, and which never will be.

Islands report from threads of their own. One lock guards all runs: a future that is
taken by another dataflow fails, or is noted as taken, before or after a report, not
during it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from replicator.controller.future import Pending
from replicator.controller.islands.waiting.room import Room

Behind = Mapping[int, frozenset[int]]
"""By number of a value, the numbers of results that depend on it."""


class _Run:
    """A run: results that are not computed yet, by number."""

    def __init__(self, behind: Behind, pending: dict[int, Pending], room: Room) -> None:
        self.behind = behind
        self.pending = pending
        self.room = room


class Runs:
    """All runs that are not done.

    >>> from replicator.controller.islands.waiting.room import room_for
    >>> runs, pending, room = Runs(), {1: Pending()}, room_for(64)
    >>> number = runs.start({0: frozenset({1})}, pending, {}, lambda number: None, room)
    >>> runs.report(number, [0], ValueError("no"))
    >>> pending[1].done.exception()
    ValueError('no')
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._count = 0

    def start(
        self,
        behind: Behind,
        pending: Mapping[int, Pending],
        inputs: Mapping[int, Pending],
        submit: Callable[[int], None],
        room: Room,
    ) -> int:
        """Start a run, before another can; return its number.

        It waits for no data, but where too many runs are not done. A run is done when
        its results are; of one without results, the room is given back by who ends it.

        Args:
          behind: What depends on each value.
          pending: Its results, by number.
          inputs: Results of other runs that it takes, by their number in it.
          submit: Passes it on, given the number of the run.
          room: Of its client, who waits while too many of its runs are not done.
        """
        run = _Run(behind, dict(pending), room)
        room.get()
        with self._lock:
            number, self._count = self._count, self._count + 1
            try:
                submit(number)
            except BaseException:  # `pw` was closed
                room.put(None)
                raise
            if pending:
                self._runs[number] = run
            for value, given in inputs.items():
                error = given.done.exception() if given.done.done() else None
                if not given.done.done():
                    given.takers.append((run, value))
                elif error is not None:
                    _fail(run, [value], error)
        return number

    def report(
        self, number: int, values: Sequence[int], error: BaseException | None
    ) -> None:
        """Settle what a run computed, or all that never will be; in any thread."""
        with self._lock:
            run = self._runs.get(number)
            if run is None:
                return
            if error is not None:
                _fail(run, values, error)
            for value in values:
                pending = run.pending.pop(value, None)
                if pending is not None:
                    pending.takers.clear()
                    pending.done.end()
            if not run.pending:
                del self._runs[number]
                run.room.put(None)


def _fail(run: _Run, values: Sequence[int], error: BaseException) -> None:
    """Fail all results behind values, here and in runs that take them."""
    for value in {n for each in values for n in run.behind.get(each, ())}:
        pending = run.pending.pop(value, None)
        if pending is not None:
            pending.done.end(error)
            for taker, number in pending.takers:
                _fail(taker, [number], error)
            pending.takers.clear()
