"""The thread that reads a connection while futures wait on it.

It starts with the first future, sleeps while no call waits, and ends when there was
none for ten seconds, or the connection is gone. A future that is entered and a reader
that goes to sleep cannot miss each other: the one enters, then looks at `is_asleep`;
the other announces that it sleeps, then looks at the table again.
"""

import queue
import threading
import time

from replicator.rpc.client.link import Link
from replicator.rpc.client.reading_role import Inbox

_TICK_S = 0.25
"""Seconds that a future may fail later than its deadline."""
_IDLE_S = 10.0


class BackgroundReader:
    """Reads for the futures of one link.

    Attributes:
      is_asleep: Whether `wake` must be called after a future was entered.
    """

    def __init__(self, link: Link) -> None:
        self.is_asleep = True
        self._link = link
        # Others put here, this thread alone takes; an item is a wake-up, with no value.
        self._inbox = Inbox()
        # Guards `_thread`: the end of one thread and the start of the next.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Let it read; start it if need be."""
        with self._lock:
            self.is_asleep = False
            # Under the lock: `_run` sets both at its end, so a thread that is about to
            # end is not taken for one that will read.
            if self._thread is None:
                # A daemon: a process may exit while futures wait. It ends by itself, in
                # `_read_on`.
                self._thread = threading.Thread(
                    target=self._run, name="rpc futures", daemon=True
                )
                self._thread.start()
            else:
                self._inbox.put(None)

    def close(self) -> None:
        """Wake the thread, which ends as the link is lost."""
        self._inbox.put(None)

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            # Also if a callback of a future ended this thread.
            with self._lock:
                self._thread = None
                self.is_asleep = True
            # A `wake` that came before this reached no thread: its call is seen here.
            if self._link.waiting and self._link.lost is None:
                self.wake()

    def _read_on(self) -> None:
        link = self._link
        while self._has_work():
            link.expire_calls()
            # A caller that waits for its own answer may be reading; it reads for the
            # futures as well. Follow it for a tick at most, as calls may be late.
            if not link.role.try_take(False):
                link.role.follow(self._inbox, _TICK_S)
                continue
            try:
                link.role.own()
                # Not longer: then it is time to look for calls that are late.
                link.read_until(lambda: not link.waiting, time.monotonic() + _TICK_S)
            finally:
                link.role.leave()
        # `leave` of another may have woken this thread, which reads no more.
        link.role.pass_on()

    def _has_work(self) -> bool:
        """Sleep until there is some; return False to end the thread."""
        link = self._link
        while link.lost is None and not link.waiting:
            link.leave_if_done()
            # In this order, see the module's docstring.
            self.is_asleep = True
            if not link.waiting:
                try:
                    self._inbox.get(timeout=_IDLE_S)
                except queue.Empty:
                    return False
            self.is_asleep = False
        return link.lost is None
