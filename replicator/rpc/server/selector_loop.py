"""One thread reads all connections of a server that the system can watch together.

A thread for each would be woken for each call, and threads of Python that hand each
other their one lock answer a third as many calls. So the loop waits with `epoll` for
any that has data, takes one message at a time from each, and handles it; quick
handlers run right there (see `read_handoff` for those that are not).

A connection that is alone has a thread of its own all the same, which spares a system
call for each message; it comes here when a second one does.
"""

import collections
import contextlib
import logging
import os
import select
import threading
import time
from typing import Protocol

from replicator.errors import CallTimeoutError, RpcError
from replicator.rpc.adaptive_spin import AdaptiveSpin
from replicator.rpc.protocols import Connection, Message
from replicator.rpc.server.read_handoff import ReadHandoff, ReadingRight
from replicator.rpc.server.worker_threads import WorkerThreads

_log = logging.getLogger(__name__)

IS_AVAILABLE = hasattr(select, "epoll") and hasattr(os, "eventfd")
_TURNS_BETWEEN_LOOKS = 16


class WatchedConnection(Protocol):
    """A `ServedConnection` as the loop uses it; its file imports this one by `service`.

    Attributes:
      connection: Connection to read.
      descriptor: Descriptor by which the loop watches it; -1 while it does not.
      is_listed: Whether it is in the loop's list of those that have data.
      is_paused: Whether its client has too much in flight.
    """

    connection: Connection
    descriptor: int
    is_listed: bool
    is_paused: bool

    def handle(self, message: Message, received_s: float, reader: ReadingRight) -> None:
        """Release the right to read, and process a message."""

    def is_alone(self) -> bool:
        """Return whether the server has no other connection."""
        ...

    def serve(self) -> None:
        """Read in a thread of its own."""

    def close(self) -> None:
        """Disconnect."""


class SelectorLoop:
    """Reads connections, in one thread at a time."""

    def __init__(self, handoff: ReadHandoff, threads: WorkerThreads) -> None:
        self._threads = threads
        self._handoff = handoff
        self._watched: dict[int, WatchedConnection] = {}
        # Any thread appends; only the holder of the right to read takes from it.
        self._ready: collections.deque[WatchedConnection] = collections.deque()
        # Guards `_watched` and the registrations of epoll, which must agree. Also
        # `_waker`, whose number may be another file's once it is closed. No thread has
        # another lock of ours when it takes this one.
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._waits: AdaptiveSpin | None = None
        self._waker = -1
        self._is_closed = False

    def add(self, watched: WatchedConnection) -> None:
        """Read a connection from now on."""
        with self._lock:
            if self._epoll is None and not self._is_closed:
                self._open()
            is_watched = self._epoll is not None and self._begin(self._epoll, watched)
        if is_watched:
            self._list(watched)  # it may have received more than was handled
        else:
            watched.close()

    def remove(self, watched: WatchedConnection) -> None:
        """Read a connection no more; to be called before its descriptor is closed."""
        with self._lock:
            if self._watched.get(watched.descriptor) is watched:
                del self._watched[watched.descriptor]
                with contextlib.suppress(OSError):  # closed by the other thread
                    if self._epoll is not None:
                        self._epoll.unregister(watched.descriptor)
                # So that `resume` changes nothing for the next owner of the number.
                watched.descriptor = -1

    def resume(self, watched: WatchedConnection) -> None:
        """Read a connection again that is paused no more."""
        with self._lock:
            self._watch(watched, select.EPOLLIN)
        # Listed as well: epoll does not report data that was received before.
        self._list(watched)

    def close(self) -> None:
        """Read nothing more."""
        with self._lock:
            # The reading thread closes the descriptors: it may be inside of `poll`.
            self._is_closed = True
            self._wake()

    def _open(self) -> None:
        """Start to read, with the lock held; the reading thread ends it by `_close`."""
        self._epoll = select.epoll()
        self._waits = AdaptiveSpin(self._epoll.poll)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._waker, select.EPOLLIN)
        ReadingRight(self._handoff, self._threads, self._read).start()

    def _begin(self, epoll: "select.epoll", watched: WatchedConnection) -> bool:
        """Watch a connection, with the lock held; return False if it is closed."""
        descriptor = watched.connection.fileno()
        try:
            epoll.register(-1 if descriptor is None else descriptor, select.EPOLLIN)
        except (OSError, ValueError):
            return False
        watched.descriptor = -1 if descriptor is None else descriptor
        self._watched[watched.descriptor] = watched
        return True

    def _watch(self, watched: WatchedConnection, events: int) -> None:
        """Change what is watched for, with the lock held."""
        if self._epoll is not None and watched.descriptor >= 0:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._epoll.modify(watched.descriptor, events)

    def _list(self, watched: WatchedConnection) -> None:
        watched.is_listed = True
        self._ready.append(watched)
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def _read(self, reader: ReadingRight) -> None:
        """Read as the holder of the right to, until it is lost or all is closed."""
        ready = self._ready
        turns = 0
        while True:
            if not ready or turns == _TURNS_BETWEEN_LOOKS:
                turns = 0
                if not self._look():
                    return
            turns += 1
            # Not kept in a name, which would keep it while nothing comes.
            if ready and not self._read_one(ready.popleft(), reader):
                return

    def _look(self) -> bool:
        """List the connections that have data; return False at the end."""
        # One thread is here at a time: the holder of the right to read.
        for descriptor, events in self._events():
            # Without the lock: an event of one that was removed just now is ignored.
            watched = self._watched.get(descriptor)
            if watched is None:
                if descriptor == self._waker:
                    os.eventfd_read(self._waker)
            elif watched.is_paused and events & (select.EPOLLHUP | select.EPOLLERR):
                watched.close()
            elif not watched.is_listed:
                watched.is_listed = True
                self._ready.append(watched)
        if self._is_closed:
            self._close()
        return not self._is_closed

    def _events(self) -> list[tuple[int, int]]:
        """Return the events of epoll; wait for some if no connection has data yet."""
        assert self._epoll is not None, "the loop reads, so it was opened"
        assert self._waits is not None, "it was made with that"
        if self._ready:
            return self._epoll.poll(0)
        started_s = time.monotonic()
        self._waits.begin(started_s)
        events = self._epoll.poll()
        self._waits.end(started_s)
        return events

    def _read_one(self, watched: WatchedConnection, reader: ReadingRight) -> bool:
        """Take one message; return whether this thread still reads."""
        # Before it is read: what arrives later lists it again.
        watched.is_listed = False
        # It was listed twice: by now it has a thread of its own, or is closed.
        if watched.descriptor < 0:
            return True
        if watched.is_paused:
            # Looked at again: it is cleared before `resume` waits for this lock.
            with self._lock:
                if watched.is_paused:  # else `resume` is on its way
                    self._watch(watched, 0)
            return True
        try:
            message = watched.connection.receive(timeout_s=0)
        except CallTimeoutError:
            return True  # a part of a message has come; epoll reports the rest
        except RpcError as error:
            _log.debug("%s: %s", watched.connection.peer, error)
            watched.close()
            return True
        except Exception:
            # Whatever one connection does, the others are read.
            _log.exception("the connection with %s ends", watched.connection.peer)
            watched.close()
            return True
        # Looked at before `handle`, which lays the right down: another may read then.
        if watched.connection.has_received():
            watched.is_listed = True
            self._ready.append(watched)
        watched.handle(message, time.monotonic(), reader)
        # Another thread is in this loop now: the list and `epoll` are its to use.
        # The handler took over 2 ms: the handoff gave the right to that thread.
        if not reader.take_up():
            return False
        # One alone gets a thread of its own again; it is removed here, in the thread
        # that polls.
        if len(self._watched) == 1 and not watched.is_listed and watched.is_alone():
            self.remove(watched)
            self._threads.run(watched.serve)
        return True

    def _close(self) -> None:
        with self._lock:
            # `add` and `_wake` look at these under the lock, so none uses a closed one.
            if self._epoll is not None:
                self._epoll.close()
                os.close(self._waker)
            self._epoll, self._waits, self._waker = None, None, -1
