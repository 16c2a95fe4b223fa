"""One thread at a time, in an order that a seed decides.

    waiting for a turn ── chosen by the seed ──> has the turn ── gives it up ──> waiting
                                                      └── its node has ended

A thread waits for a condition, for a moment of the program's own time, or for both.
That time stands still while a thread can go on, and jumps to the next moment when none
can: no test waits for it. A thread that holds its turn for very long waits for
something that is not an edge (a lock, a queue); then the order is lost, and all raise
an error.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from replicator.errors import LaunchError
from replicator.launchpad_bridge.running.stop_event import StopEvent


class _Wait(NamedTuple):
    number: int
    until: Callable[[], bool]
    due_s: float


class Turns:
    """Turns of threads; safe for all threads.

    Attributes:
      now_s: The program's own time.
    """

    def __init__(self, names: Iterable[str], seed: int, *, longest_s: float) -> None:
        """Wait for all of `names` to come before the first gets its turn.

        Args:
          names: Names of threads that take turns.
          seed: Decides the order.
          longest_s: Seconds that a turn may be held.
        """
        # Guards all below but `_mine`. Conditions of waiting threads are called with it
        # held, in the thread that chooses next: they must not wait.
        # All that wait for it are woken when a turn passes, or the order is lost.
        self._condition = threading.Condition()
        self._random = random.Random(seed)
        self._expected = set(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._waiting: dict[str, _Wait] = {}
        self._holder: str | None = None
        self._turn = 0
        self.now_s = 0.0
        self._longest_s = longest_s
        self._lost = ""
        # The name under which a thread takes turns; each thread sees its own.
        self._mine = threading.local()
        self._guests = 0

    def has_turn(self) -> bool:
        """Return whether this thread takes turns, and has one."""
        return getattr(self._mine, "name", None) is not None

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Take part under a name, beginning with a turn; leave at the end."""
        self._mine.name = name
        try:
            self.give_up()
            yield
        finally:
            self._mine.name = None
            # However the node has ended: a turn that is kept would stop all others.
            with self._condition:
                self._expected.discard(name)
                if self._holder == name:
                    self._holder = None
                self._choose()

    @contextlib.contextmanager
    def outside(self, names: Iterable[str]) -> Iterator[None]:
        """Give the turn up to others for a block, and have one again after it.

        Args:
          names: Threads that will come now; none gets a turn before they have.
        """
        with self._condition:
            for name in names:
                self._numbers.setdefault(name, len(self._numbers))
                self._expected.add(name)
            if self._holder == self._mine.name:
                self._holder = None
        name, self._mine.name = self._mine.name, None
        try:
            yield
        finally:
            self._mine.name = name
            self.give_up()

    @contextlib.contextmanager
    def guest(self) -> Iterator[None]:
        """Take part for a moment, in a thread that is no node's."""
        if self.has_turn():
            yield
            return
        with self._condition:
            self._guests += 1
            name = f"guest {self._guests}"
            self._numbers[name] = len(self._numbers)
        with self.taken(name):
            yield

    def give_up(
        self, until: Callable[[], bool] = lambda: True, timeout_s: float = 0.0
    ) -> bool:
        """Let others go on; return at the next turn, once a condition holds.

        Args:
          until: The condition.
          timeout_s: How long it may take, of the program's own time.

        Returns:
          Whether the condition holds.

        Raises:
          LaunchError: The order is lost; names the thread that held its turn.
        """
        name = self._mine.name
        with self._condition:
            due_s = self.now_s + timeout_s
            self._waiting[name] = _Wait(self._numbers[name], until, due_s)
            self._expected.discard(name)
            if self._holder == name:
                self._holder = None
            self._choose()
            self._wait_turn(name)
            if self._lost:
                raise LaunchError(self._lost)
            return until()

    def look_again(self) -> None:
        """Choose a thread, if none has the turn: a condition may hold by now."""
        with self._condition:
            self._choose()

    def _wait_turn(self, name: str) -> None:
        # Each waiting thread watches the holder, by a timeout of its own.
        while self._holder != name and not self._lost:
            turn, holder = self._turn, self._holder
            in_time = self._condition.wait(self._longest_s)
            if not in_time and holder is not None and turn == self._turn:
                self._lose(holder)

    def _lose(self, holder: str) -> None:
        self._lost = (
            f"In a fixed order every wait must be for an edge, got {holder!r} holding "
            f"its turn for {self._longest_s:g} s: it waits for another node by other "
            "means, or works long. Launch without `seed`, or raise `longest_turn_s`."
        )
        self._condition.notify_all()

    def _choose(self) -> None:
        """Give a thread the turn, if it is free and all have come."""
        # No thread is chosen before all have come: the order must not depend on which
        # of them the system starts first.
        if self._holder is not None or self._expected or not self._waiting:
            return
        able = self._able()
        if not able:
            due_s = min(wait.due_s for wait in self._waiting.values())
            if due_s == float("inf"):
                return  # until something comes from outside
            self.now_s = due_s
            able = self._able()
        self._holder = self._random.choice(able)
        self._turn += 1
        del self._waiting[self._holder]
        self._condition.notify_all()

    def _able(self) -> list[str]:
        """List threads that can go on, in the order of the program."""
        able = [
            (wait.number, name)
            for name, wait in self._waiting.items()
            if wait.due_s <= self.now_s or wait.until()
        ]
        return [name for _, name in sorted(able)]


class TurnEvent(StopEvent):
    """A stop event; to wait for it is to let others go on."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def set(self) -> None:
        """Set it, and let threads that wait for it go on."""
        super().set()
        self._turns.look_again()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in the program's own time, if this thread takes turns."""
        if not self._turns.has_turn():
            return super().wait(timeout)
        limit_s = float("inf") if timeout is None else timeout
        return self._turns.give_up(self.is_set, limit_s)
