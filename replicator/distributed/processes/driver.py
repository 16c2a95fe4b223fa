"""Perform what the supervisor decides, in one thread: events in, actions out.

    signals, users' wishes to stop ─┐
                                    ├──> queue ──> `run` ──> start, stop, kill, log
    threads that watch workers ─────┘

The thread of `run` alone touches the supervisor's state, and starts, stops and kills
workers: whoever starts workers for it needs no locks for that.
"""

import abc
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from replicator.distributed.processes import states
from replicator.distributed.processes.supervisor import begin, decide, next_deadline_s

_LOG = logging.getLogger(__name__)


class Worker(Protocol):
    """One start of a worker."""

    def stop(self) -> None:
        """Ask it to stop (sets its `stop_event`); returns at once."""

    def kill(self) -> None:
        """End it and all that it started, if it still runs; returns at once."""


class Driver(abc.ABC):
    """Runs units of workers until all have ended; subclasses start the workers.

    Args:
      units: Units to run.
      timeouts: How long to wait for what.

    Attributes:
      state: State of the supervisor; replaced, never changed. None before `run`.
    """

    def __init__(self, units: Sequence[states.Unit], timeouts: states.Timeouts) -> None:
        # Written by the thread of `run` alone. Other threads read this state or the one
        # before, whole, as states are frozen: no lock.
        self.state: states.State | None = None
        self.timeouts = timeouts
        self._units = units
        # The last start of each worker, ended or not; of the thread of `run` alone.
        self._running: dict[str, Worker | None] = {}
        # From threads that watch workers, and signal handlers (`put` is re-entrant), to
        # the thread of `run` alone. What comes after the end is never taken.
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Taken from the queue, but not decided yet; of the thread of `run` alone.
        self._taken: deque[Any] = deque()

    @abc.abstractmethod
    def start_worker(self, name: str, attempt: int) -> Worker | None:
        """Start a worker; return None if it did not, and report that as its end."""

    @abc.abstractmethod
    def to_ended(self, end: Any, state: states.State) -> states.Ended:
        """Return the supervisor's event for a reported end, in a state."""

    @abc.abstractmethod
    def log(self, messages: Sequence[str]) -> None:
        """Log the messages that one event led to."""

    def note(self) -> None:  # noqa: B027  # a launcher may need none
        """Take note of a new `state`."""

    def report(self, event: Any) -> None:
        """Take a `StopAsked`, or the end of a worker as `to_ended` takes it.

        May be called in any thread, and in a signal handler.
        """
        self._events.put(event)

    def run(self) -> states.Finish:
        """Start all units, and return once the run is over."""
        state, actions = begin(self._units, time.monotonic(), timeouts=self.timeouts)
        while True:
            # Before the actions: what these start may look at it at once.
            self.state = state
            finish = self._perform(actions)
            if finish is not None:
                return finish
            self.note()
            event = self._next_event(next_deadline_s(state))
            if not isinstance(event, states.StopAsked | states.TimeUp):
                event = self.to_ended(event, state)
            state, actions = decide(state, event, time.monotonic())

    def _next_event(self, due_s: float | None) -> Any:
        left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        try:
            # What has happened comes before the time: this process may have been
            # suspended meanwhile.
            if not self._taken:
                limit_s = None if left_s is None else min(left_s, threading.TIMEOUT_MAX)
                self._taken.append(self._events.get(timeout=limit_s))
        except queue.Empty:
            return states.TimeUp()
        # Only this thread takes from the queue: what is seen here is still there.
        while not self._events.empty():
            self._taken.append(self._events.get())
        # A signal comes first. Workers may have got it, too: they did as they were
        # asked, and are not to be started again.
        urgent = [e for e in self._taken if self._is_signal(e)]
        event = [*urgent, *self._taken][0]
        self._taken.remove(event)
        return event

    def _is_signal(self, event: Any) -> bool:
        return (
            isinstance(event, states.StopAsked)
            and event.by in self.timeouts.stop_requests_to_kill
        )

    def _perform(self, actions: Sequence[states.Action]) -> states.Finish | None:
        # Before the actions, which may take a while.
        messages = [each.message for each in actions if isinstance(each, states.Log)]
        if messages:
            self.log(messages)
        for action in actions:
            match action:
                case states.Start():
                    for name in action.names:
                        self._running[name] = self.start_worker(name, action.attempt)
                case states.StopWorkers():
                    self._try("stop", action.names)
                case states.Kill():
                    self._try("kill", action.names)
                case states.Finish():
                    return action
        return None

    def _try(self, method: str, names: Sequence[str]) -> None:
        for name in names:
            worker = self._running.get(name)
            try:
                if worker is not None:
                    getattr(worker, method)()
            except Exception:
                # A launcher that breaks its promises: the run goes on to its deadlines,
                # and kills, or leaves behind, what did not stop.
                _LOG.exception("could not %s `%s`", method, name)
