"""Hand reading to another thread while the reader runs a handler.

A quick handler runs in the thread that read its call: no other thread wakes up, which
is most of the cost of a call. Meanwhile no thread reads there. Handlers are mostly as
quick as they were before; when one is not, or its reply is not taken, the handoff gives
the right to read to another thread after 2 ms, so that pings, cancellations and other
calls get through. The first thread reads no more when it is done. Without this a
handler that was quick and now blocks would block its whole server.

`watch` sleeps as long as no reader is busy, so a quiet server uses no time.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable

from replicator.rpc.server.served_call import ServedCall
from replicator.rpc.server.worker_threads import WorkerThreads

RELIEF_AFTER_S = 0.002
_LOOKS_BEFORE_SLEEP = 50
_LONGEST_SLEEP_S = 60.0


class ReadHandoff:
    """Watch that relieves busy readers; it looks every 2 ms.

    Attributes:
      busy: Time since which each reader is busy. A reader adds itself, then wakes the
        handoff if it `is_asleep`; the handoff sets `is_asleep`, then looks at `busy`
        once more. So one of the two sees the other.
      is_asleep: Whether it must be woken.
    """

    def __init__(self) -> None:
        # Changed by single atomic operations; no lock.
        self.busy: dict[ReadingRight, float] = {}
        self.is_asleep = False
        self._alarm: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closed = False

    def wake(self) -> None:
        """Make `watch` look again."""
        self.is_asleep = False
        self._alarm.put(None)

    def close(self) -> None:
        """Let `watch` return."""
        self._is_closed = True
        self.wake()

    def watch(self) -> None:
        """Relieve readers until closed."""
        quiet_looks = 0
        while not self._is_closed:
            time.sleep(RELIEF_AFTER_S)
            # A wake-up costs a client more than some idle looks, so not at once.
            quiet_looks = 0 if self.busy else quiet_looks + 1
            if quiet_looks > _LOOKS_BEFORE_SLEEP:
                self._sleep()
                quiet_looks = 0
            now_s = time.monotonic()
            # A copy: readers enter and leave meanwhile, without a lock.
            for reader, since_s in self.busy.copy().items():
                if now_s - since_s >= RELIEF_AFTER_S:
                    reader.relieve(since_s)

    def _sleep(self) -> None:
        self.is_asleep = True
        if not self.busy and not self._is_closed:
            with contextlib.suppress(queue.Empty):
                self._alarm.get(timeout=_LONGEST_SLEEP_S)
        self.is_asleep = False


class ReadingRight:
    """Right to read one connection, or one selector; passes from thread to thread.

    Attributes:
      call: Quick call that its holder runs.
    """

    def __init__(
        self,
        handoff: ReadHandoff,
        threads: WorkerThreads,
        read: Callable[["ReadingRight"], None],
    ) -> None:
        """Make a right that no thread holds.

        Args:
          handoff: Watch over it.
          threads: Threads in which its holders run.
          read: Reads as the holder, until the right is lost or there is no more to
            read.
        """
        self.call: ServedCall | None = None
        self._handoff = handoff
        self._threads = threads
        self._read = read
        # Held by the thread that reads, never while a handler runs. Not an RLock:
        # `start` and `relieve` take it for a thread that they start, so the one that
        # releases it is often another. No lock of ours is held when it is waited for.
        self._right = threading.Lock()
        self._take = self._right.acquire

    def start(self) -> None:
        """Let a thread read."""
        self._right.acquire()
        self._threads.run(functools.partial(self._read, self))

    def lay_down(self, now_s: float) -> None:
        """Release the right for a handler; another thread may take it after 2 ms."""
        handoff = self._handoff
        handoff.busy[self] = now_s
        if handoff.is_asleep:
            handoff.wake()
        # From here on another thread may read, so the caller must receive no more.
        self._right.release()

    def take_up(self) -> bool:
        """Take the right back; return False if another thread reads by now."""
        if not self._take(False):
            return False
        # Only the holder of the right changes the entry, so this is the caller's own.
        self._handoff.busy.pop(self, None)
        return True

    def relieve(self, since_s: float) -> None:
        """Let another thread read if this one has been busy since then."""
        # Between the two the reader may have begun another call. Then that one is
        # relieved too early and its method counts as slow, which costs only time.
        if self._handoff.busy.get(self) == since_s and self._take(False):
            self._handoff.busy.pop(self, None)
            # Set by a thread that runs on meanwhile, so it may be over, or None.
            call = self.call
            # Its handler is done and its reply is not taken: the client is to blame,
            # and not the method.
            if call is not None and call.is_over:
                call.caller.is_stalled = True
            elif call is not None:
                call.target.held_up()
            # Taken by this thread; held from now on by the one that reads.
            self._threads.run(functools.partial(self._read, self))
