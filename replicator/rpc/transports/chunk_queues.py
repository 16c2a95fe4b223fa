"""Chunks of bytes on their way between a connection and a stream; bounded both ways.

    send -> Outgoing -> stream -> Incoming -> receive

A stream that does not move fills its queue, and a full queue stops who fills it: so a
slow reader stops its sender, with a few chunks in between. What a stream costs per
chunk (some 100 us in Python) small messages share: those that wait leave together.
"""

import collections
import queue
import threading
import time
from collections.abc import Iterator

# About the best for throughput of those tried, 0.5 to 4 MiB; and it is what a peer that
# has not proved itself could make us hold. The second term is room for a head, so that
# an array of 1 MiB is one chunk.
CHUNK_BYTES = (1 << 20) + (1 << 14)
WAITING_CHUNKS = 4


class ClosedError(Exception):
    """The queue takes no more, or has no more; never leaves this room."""


class Outgoing:
    """Chunks that wait for the stream to take them: about `WAITING_CHUNKS` of them."""

    def __init__(self) -> None:
        """Start empty, and open."""
        self._changed = threading.Condition()
        self._chunks: collections.deque[bytes] = collections.deque()
        self._num_bytes = 0
        self._is_open = True
        self._drained = threading.Event()

    def put(self, chunk: bytes, *, deadline: float | None) -> None:
        """Add a chunk as soon as there is room.

        Args:
          chunk: At most `CHUNK_BYTES`.
          deadline: On the monotonic clock; None waits until the queue is closed.

        Raises:
          ClosedError: It was closed.
          TimeoutError: There was no room in time.
        """
        with self._changed:
            while self._is_open and self._is_full(len(chunk)):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._changed.wait(left)
            if not self._is_open:
                raise ClosedError
            self._chunks.append(chunk)
            self._num_bytes += len(chunk)
            self._changed.notify_all()

    def take(self) -> bytes | None:
        """Wait for chunks; return one, or several small ones as one; None at the end.

        Who calls it again says by that that the stream has taken what was returned.
        """
        with self._changed:
            while self._is_open and not self._chunks:
                self._changed.wait()
            if not self._chunks:
                self._drained.set()
                return None
            taken = [self._chunks.popleft()]
            num_bytes = len(taken[0])
            while self._chunks and num_bytes + len(self._chunks[0]) <= CHUNK_BYTES:
                taken.append(self._chunks.popleft())
                num_bytes += len(taken[-1])
            self._num_bytes -= num_bytes
            self._changed.notify_all()
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def finish(self) -> None:
        """Take no more; what waits may still leave."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def abandon(self) -> None:
        """Take no more, and drop what waits."""
        with self._changed:
            self._is_open = False
            self._chunks.clear()
            self._num_bytes = 0
            self._changed.notify_all()

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until all of a finished queue has left; tell whether it has."""
        return self._drained.wait(timeout_s)

    def _is_full(self, more: int) -> bool:
        waiting = self._num_bytes
        return bool(waiting) and waiting + more > WAITING_CHUNKS * CHUNK_BYTES


class Incoming:
    """Chunks that have arrived and were not read: a bounded number of them."""

    def __init__(self, room: int = WAITING_CHUNKS) -> None:
        """Start empty; `room` is how many chunks may wait, one for a stranger."""
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_open = True
        self._ended = threading.Event()
        self.failure: Exception | None = None
        self.widen(room)

    def widen(self, room: int) -> None:
        """Let `room` more chunks wait."""
        for _ in range(room):
            self._room.put(None)

    def fill_from(self, stream: Iterator[bytes]) -> None:
        """Read the stream to its end, no further ahead than there is room."""
        try:
            while True:
                self._room.get()
                if not self._is_open:
                    return
                self._chunks.put(next(stream))
        except StopIteration:
            return
        except Exception as failure:  # told by who reads
            self.failure = failure
        finally:
            self._chunks.put(None)
            self._ended.set()

    def get(self, timeout_s: float | None) -> bytes:
        """Return the next chunk.

        Raises:
          ClosedError: There are no more; `failure` says why if it was no good end.
          TimeoutError: None came in time.
        """
        try:
            chunk = self._chunks.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if chunk is None:
            self._chunks.put(None)  # for the next who asks
            raise ClosedError
        self._room.put(None)
        return chunk

    def has_some(self) -> bool:
        """Tell whether `get` has an answer without waiting."""
        return not self._chunks.empty()

    def stop(self) -> None:
        """Read no more of the stream; a waiting `get` raises."""
        self._is_open = False
        self._room.put(None)
        self._chunks.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the stream has ended; tell whether it has."""
        return self._ended.wait(timeout_s)
