"""Threads that wait for tasks, and end after a while without one.

All threads of a server come from one of these: readers of connections, handlers, the
one that accepts. A thread that has slept least is taken first, so that few are awake
and the rest end.
"""

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

Task = Callable[[], None]
_Inbox = queue.SimpleQueue[Task | None]


class WorkerThreads:
    """Runs each task in a thread of its own, new or used."""

    def __init__(self, name: str, *, idle_s: float = 10.0, max_idle: int = 8) -> None:
        """Begin without threads.

        Args:
          name: Name of the threads.
          idle_s: Seconds that a thread waits for a task.
          max_idle: Number of threads that may wait.
        """
        self._name = name
        self._idle_s = idle_s
        self._max_idle = max_idle
        # Guards `_idle`, `_overdue` and `_is_closed`. No task runs and no thread is
        # started or waited for under it. `_members` changes by atomic operations.
        self._lock = threading.Lock()
        # A thread that takes an inbox off this list must put exactly one item into it.
        self._idle: list[_Inbox] = []
        self._overdue: collections.deque[Task] = collections.deque()
        self._is_closed = False
        self._members: set[threading.Thread] = set()

    def run(self, task: Task) -> None:
        """Start a task in a thread of its own.

        Raises:
          RuntimeError: The system gives no thread, and none runs.
        """
        # The last that went idle: its stack is warm, and the first ones time out.
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            self._hire(task)
        else:
            inbox.put(task)

    def close(self, timeout_s: float) -> bool:
        """Let idle threads end, and others after their task; wait for all.

        Returns:
          Whether all ended within `timeout_s`; the caller's own thread does not count.
        """
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().put(None)
        until_s = time.monotonic() + timeout_s
        own = threading.current_thread()
        for thread in self._members.copy() - {own}:
            with contextlib.suppress(RuntimeError):  # not started yet
                thread.join(max(0.0, until_s - time.monotonic()))
        # A thread leaves the set at its end; it is there before it is started.
        return self._members.copy() <= {own}

    def _hire(self, task: Task) -> None:
        inbox = _Inbox()
        inbox.put(task)
        name = f"{self._name} {len(self._members)}"
        # Ends by itself, in `_next`. A daemon: handlers that never return must not keep
        # the process alive.
        thread = threading.Thread(
            target=self._work, args=[inbox], name=name, daemon=True
        )
        # Before it starts: `close` must find it, and it removes itself at its end.
        self._members.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._members.discard(thread)
            if not self._members:
                raise
            _log.warning("%s: the system gives no more threads", self._name)
            with self._lock:
                if self._idle:  # since it was looked at
                    self._idle.pop().put(task)
                else:
                    self._overdue.append(task)  # for the next thread that is done

    def _work(self, inbox: _Inbox) -> None:
        """Run tasks in this thread until none comes for a while."""
        task = inbox.get()
        try:
            while task is not None:
                try:
                    task()
                except BaseException:
                    _log.exception("a thread of %s failed", self._name)
                del task  # free its arrays before the wait for the next one
                task = self._next(inbox)
        finally:
            self._members.discard(threading.current_thread())

    def _next(self, inbox: _Inbox) -> Task | None:
        """Return the next task; None to end."""
        with self._lock:
            if self._overdue:
                return self._overdue.popleft()
            if self._is_closed or len(self._idle) >= self._max_idle:
                return None
            self._idle.append(inbox)
        # Without the lock: others put tasks into the inbox meanwhile.
        try:
            return inbox.get(timeout=self._idle_s)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            return inbox.get()  # another thread took it off the list: its task comes
