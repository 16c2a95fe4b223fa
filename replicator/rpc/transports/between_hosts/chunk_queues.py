"""What waits to leave on a stream of chunks; bounded, so that no end runs away.

    send -> `Outgoing` -> the stream -> `BoundedQueue` -> receive

A thread at each side of the stream moves chunks. A stream that does not move fills its
queue, and a full queue stops who fills it: so a slow reader stops its sender. What a
stream costs per chunk (some 100 us in Python) small messages share: those that wait
leave together.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from replicator.rpc.transports.bounded_queue import BoundedQueue

# About the best for throughput of those tried, 0.25 to 4 MiB; and it is what a peer
# that has not proved itself could make us hold. The second term is room for a head, so
# that an array of 1 MiB is one chunk.
CHUNK_BYTES = (1 << 20) + (1 << 14)
WAITING_BYTES = 4 << 20


class _Large(NamedTuple):
    """A message that is cut while it leaves; runs from its first chunk to its last."""

    chunks: Iterator[bytes]
    leaving: Future[None]


class Outgoing:
    """Messages that wait for the stream to take them: about `WAITING_BYTES`."""

    def __init__(self) -> None:
        """Start empty, and open."""
        self._waiting: BoundedQueue[bytes | _Large] = BoundedQueue(
            WAITING_BYTES, size=_size
        )
        # Written by who takes. Who abandons sets `_is_abandoned` and then looks here;
        # who takes does it the other way round: one of both tells the sender.
        self._large: _Large | None = None
        self._is_abandoned = False
        self._drained = threading.Event()

    @property
    def is_open(self) -> bool:
        """Tell whether more may be put."""
        return not self._waiting.has_ended

    def put(self, chunk: bytes, *, deadline: float | None) -> None:
        """Add a message of one chunk as soon as there is room.

        Args:
          chunk: At most `CHUNK_BYTES`.
          deadline: On the monotonic clock; None waits until the queue is closed.

        Raises:
          EOFError: It was closed.
          TimeoutError: There was no room in time.
        """
        self._waiting.put(chunk, _left_s(deadline))

    def put_large(self, chunks: Iterator[bytes], *, deadline: float | None) -> None:
        """Add a message of several chunks, and wait until the last has left.

        Args:
          chunks: Of at most `CHUNK_BYTES`; iterated in the thread that takes them, and
            joined with no other message.
          deadline: On the monotonic clock; None waits until the queue is closed.

        Raises:
          EOFError: It was closed.
          TimeoutError: It did not leave in time. If a part of it has left, the queue is
            closed: nobody could read what would follow.
        """
        large = _Large(chunks, Future())
        self._waiting.put(large, _left_s(deadline))
        try:
            # Meanwhile the thread that takes reads the caller's arrays.
            large.leaving.result(_left_s(deadline))
        except BaseException:  # also Ctrl-C
            if not large.leaving.cancel():  # it has begun
                self.abandon()
            raise

    def take(self) -> bytes | None:
        """Return the next chunk, of one or several messages, or None: the end.

        One thread calls it, and says by calling again that the stream has taken what it
        got before.
        """
        while True:
            if self._large is not None:
                chunk = None if self._is_abandoned else next(self._large.chunks, None)
                if chunk is not None:
                    return chunk
                self._end_large()
            try:
                first = self._waiting.take(None)
            except EOFError:
                self._drained.set()
                return None
            if isinstance(first, bytes):
                return self._with_others(first)
            if first.leaving.set_running_or_notify_cancel():
                self._large = first

    def finish(self) -> None:
        """Take no more; what waits may still leave."""
        self._waiting.end()

    def abandon(self) -> None:
        """Take no more, and drop what waits."""
        self._is_abandoned = True
        for dropped in self._waiting.end(drop=True):
            if isinstance(dropped, _Large):
                _fail(dropped)
        if (large := self._large) is not None:
            _fail(large)
        self._drained.set()

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until nothing of a finished queue is left; tell whether it is so."""
        return self._drained.wait(timeout_s)

    def _with_others(self, first: bytes) -> bytes:
        """Return a small message, with those that wait behind it and fit."""
        taken, room = [first], CHUNK_BYTES - len(first)
        while isinstance(following := self._waiting.take_small(room), bytes):
            taken.append(following)
            room -= len(following)
        return first if len(taken) == 1 else b"".join(taken)

    def _end_large(self) -> None:
        large, self._large = self._large, None
        assert large is not None
        if self._is_abandoned:
            _fail(large)
        else:
            with contextlib.suppress(InvalidStateError):  # abandoned meanwhile
                large.leaving.set_result(None)


def start_thread(name: str, run: Callable[[], None]) -> None:
    """Start one that moves chunks; it ends with its stream, or with the process."""
    threading.Thread(target=run, name=f"rpc-stream-{name}", daemon=True).start()


def _size(message: bytes | _Large) -> int:
    return len(message) if isinstance(message, bytes) else CHUNK_BYTES


def _fail(large: _Large) -> None:
    with contextlib.suppress(InvalidStateError):  # its sender gave up, or it has left
        large.leaving.set_exception(EOFError())


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
