"""Send futures when their server is there: at first, and again after a failed try.

One thread of the client, which starts when a future has to wait and ends when none
does. So `client.futures.method()` never waits for a connection.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from replicator.rpc.client.call_futures import CallFuture

Send: TypeAlias = Callable[[list[CallFuture]], None]


class Resender:
    """Futures to be sent, each with the time when it is due."""

    def __init__(self) -> None:
        """Make one; no thread starts yet."""
        self._due: list[tuple[float, int, CallFuture]] = []
        self._order = itertools.count()
        # Guards all of these; no other lock is taken under it. `send` is called without
        # it, as it connects.
        self._changed = threading.Condition()
        self._is_running = False

    def put(self, future: CallFuture, delay_s: float, send: Send) -> None:
        """Let a future be sent after a while.

        Args:
          future: Future to be sent.
          delay_s: Seconds until then.
          send: Tries each of the given futures once, within a second; may `put` them
            back. The same each time; not kept here, as that would make a circle.
        """
        with self._changed:
            due_s = time.monotonic() + delay_s
            # The number keeps futures of one time in order: they cannot be compared.
            heapq.heappush(self._due, (due_s, next(self._order), future))
            self._changed.notify()
            if not self._is_running:
                self._is_running = True
                # A daemon, which ends when no future waits: see `_next`.
                threading.Thread(
                    target=self._run, args=[send], name="rpc resending", daemon=True
                ).start()

    def waiting(self) -> list[CallFuture]:
        """Return the futures that are not sent yet."""
        return [future for _, _, future in self._due]

    def take_all(self) -> list[CallFuture]:
        """Take out the futures that were not sent, and return them."""
        with self._changed:
            left = self.waiting()
            self._due.clear()
            self._changed.notify()
        return left

    def _run(self, send: Send) -> None:
        while futures := self._next():
            # Cancelled ones are done.
            waiting = [future for future in futures if not future.done()]
            if waiting:
                send(waiting)
            del futures, waiting  # they hold arguments, and the next wait may be long

    def _next(self) -> list[CallFuture]:
        """Wait for some that are due, return all that are; none to end the thread."""
        with self._changed:
            while self._due:
                now_s = time.monotonic()
                if self._due[0][0] > now_s:
                    self._changed.wait(self._due[0][0] - now_s)
                    continue
                due = []
                while self._due and self._due[0][0] <= now_s:
                    due.append(heapq.heappop(self._due)[2])
                return due
            # Under the lock: a `put` that comes after this starts another thread.
            self._is_running = False
            return []
