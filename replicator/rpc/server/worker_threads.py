"""Threads that wait for something to do, and end when there was nothing for a while.

All threads of a server come from its crew: readers of connections, handlers, the one
that accepts. A thread that has slept least is taken first, so that few are awake and
the rest go home.
"""

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import final

_log = logging.getLogger(__name__)

Task = Callable[[], None]


@final
class WorkerThreads:
    """Runs each task in a thread of its own, new or used."""

    def __init__(self, name: str, *, idle_s: float = 10.0, max_idle: int = 8) -> None:
        """Make a crew without threads.

        Args:
          name: Of the threads.
          idle_s: How long a thread waits for a task.
          max_idle: How many do.
        """
        self._name = name
        self._idle_s = idle_s
        self._max_idle = max_idle
        # All are changed by single atomic operations only.
        # Who takes the thread of another off `_idle` owes its inbox exactly one item.
        self._idle: list[_Member] = []
        self._members: set[_Member] = set()
        self._overdue: collections.deque[Task] = collections.deque()
        self._is_closed = False

    def run(self, task: Task) -> None:
        """Start a task in a thread of its own.

        Raises:
          RuntimeError: The system gives no thread, and the crew has none.
        """
        try:
            member = self._idle.pop()
        except IndexError:
            self._hire(task)
        else:
            member.inbox.put(task)

    def close(self, timeout_s: float) -> bool:
        """Let idle threads end, and others after their task; wait for all.

        Returns:
          Whether all ended within `timeout_s`; the caller's own thread does not count.
        """
        # Before the list is emptied: `_next` enters a thread, then looks at this.
        self._is_closed = True
        while self._idle:
            try:
                self._idle.pop().inbox.put(None)
            except IndexError:
                break
        until_s = time.monotonic() + timeout_s
        own = threading.current_thread()
        for member in list(self._members):
            if member.thread is not own:
                with contextlib.suppress(RuntimeError):  # not started yet
                    member.thread.join(max(0.0, until_s - time.monotonic()))
        # Who ends leaves the list, so in it is also who is about to be started.
        return all(member.thread is own for member in list(self._members))

    def work(self, member: "_Member") -> None:
        """Run tasks in this thread until none comes for a while."""
        try:
            while (task := self._next(member)) is not None:
                try:
                    task()
                except BaseException:
                    _log.exception("a thread of %s failed", self._name)
                del task  # it may hold arrays, and the next may be long in coming
        finally:
            self._members.discard(member)

    def _hire(self, task: Task) -> None:
        member = _Member(self, f"{self._name} {len(self._members)}")
        self._members.add(member)
        member.inbox.put(task)
        try:
            member.thread.start()
        except RuntimeError:
            self._members.discard(member)
            if not self._members:
                raise
            _log.warning("%s: the system gives no more threads", self._name)
            self._overdue.append(task)  # for who is done next

    def _next(self, member: "_Member") -> Task | None:
        """Return what to do; None to end."""
        if not member.inbox.empty():
            return member.inbox.get()
        with contextlib.suppress(IndexError):
            return self._overdue.popleft()
        if self._is_closed or len(self._idle) >= self._max_idle:
            return None
        self._idle.append(member)
        if self._is_closed and self._has_left(member):
            return None  # `close` may have looked at the list before
        while True:
            try:
                return member.inbox.get(timeout=self._idle_s)
            except queue.Empty:
                if self._has_left(member):
                    return None
                # Who took it off the list is about to give it a task.

    def _has_left(self, member: "_Member") -> bool:
        try:
            self._idle.remove(member)
        except ValueError:
            return False
        return True


@final
class _Member:
    def __init__(self, crew: WorkerThreads, name: str) -> None:
        self.inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=crew.work, args=(self,), name=name, daemon=True
        )
