"""Bounded queues on both sides of a stream of chunks.

    send -> Outgoing -> the stream -> Incoming -> receive

The stream's own threads do the copying, chunk by chunk; a sender or receiver switches
threads once for a message, however large. A stream that does not move fills its queue,
and a full queue blocks the thread that fills it: so a slow reader stops its sender.
Small messages share the cost of a chunk (some 100 us in Python): those that wait leave
together.
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from replicator.rpc.transports.frames import FrameReader, MessageFrame

# About the best for throughput of 0.25 to 4 MiB; and the most that a peer without a
# proof could make us hold. The second term is room for a head, so that an array of 1
# MiB is one chunk.
CHUNK_BYTES = (1 << 20) + (1 << 14)
WAITING_BYTES = 4 << 20


T = TypeVar("T")


class ClosedError(Exception):
    """The queue takes no more, or has no more; never leaves this room."""


class _Large:
    """A message that is cut while it leaves."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.has_begun = False
        self.is_withdrawn = False
        self.has_left = threading.Event()


class Outgoing:
    """Messages that wait for the stream to take them: about `WAITING_BYTES`.

    Attributes:
      is_open: Whether more may be put.
    """

    # Threads meet in `SimpleQueue`, which is much quicker than a condition; the
    # condition is for senders that find no room.

    def __init__(self) -> None:
        """Start empty, and open."""
        self._waiting: queue.SimpleQueue[bytes | _Large | None] = queue.SimpleQueue()
        self._next: bytes | _Large | None = None
        # Guards the numbers, `_large` and `is_open`: nothing is put after the end. No
        # other lock is taken under it, and the stream is not used under it.
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._are_waiting = 0
        self._large: set[_Large] = set()
        self.is_open = True
        self._is_abandoned = False
        self._drained = threading.Event()

    def put(self, chunk: bytes, *, deadline: float | None) -> None:
        """Add a message of one chunk as soon as there is room.

        Args:
          chunk: At most `CHUNK_BYTES`.
          deadline: On the monotonic clock; None waits until the queue is closed.

        Raises:
          ClosedError: It was closed.
          TimeoutError: There was no room in time.
        """
        with self._changed:
            # Each sender that waits looks again when the stream has moved, or closed.
            while self.is_open and self._num_bytes + len(chunk) > WAITING_BYTES:
                self._wait_for_room(deadline)
            if not self.is_open:
                raise ClosedError
            self._num_bytes += len(chunk)
            self._waiting.put(chunk)

    def put_large(self, chunks: Iterator[bytes], *, deadline: float | None) -> None:
        """Add a message of several chunks, and wait until the last has left.

        Args:
          chunks: Chunks of at most `CHUNK_BYTES`; iterated in the taking thread, and
            joined with no other message.
          deadline: On the monotonic clock; None waits until the queue is closed.

        Raises:
          ClosedError: It was closed.
          TimeoutError: It did not leave in time. If a part of it has left, the queue is
            closed: nobody could read what would follow.
        """
        large = _Large(chunks)
        with self._changed:
            if not self.is_open:
                raise ClosedError
            self._large.add(large)
            self._waiting.put(large)
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        # Meanwhile the thread that takes reads the caller's arrays through `chunks`.
        is_in_time = large.has_left.wait(left_s)
        # The writing thread takes it out of the set when the last chunk has left.
        with self._changed:
            is_whole = large not in self._large
            self._large.discard(large)
            large.is_withdrawn = not is_whole
        if is_whole:
            return
        if is_in_time:
            raise ClosedError
        # Outside of the lock, which `abandon` takes.
        if large.has_begun:
            self.abandon()
        raise TimeoutError

    def take(self) -> bytes | None:
        """Return the next chunk, of one or several messages, or None: the end.

        One thread calls it; the next call implies that the stream has taken the chunk
        before.
        """
        while not self._is_abandoned:
            # `_next` is this thread's own: what did not fit into the last chunk.
            first, self._next = self._next or self._waiting.get(), None
            if first is None:
                break
            if isinstance(first, bytes):
                return self._with_others(first)
            chunk = self._next_of(first)
            if chunk is not None:
                self._next = first
                return chunk
        self._drained.set()
        return None

    def finish(self) -> None:
        """Take no more; what waits may still leave."""
        with self._changed:
            self.is_open = False
            # The end of the queue: `take` returns it when all before it has left.
            self._waiting.put(None)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Take no more, and drop what waits."""
        # Before the queue is woken: `take` looks at it for each chunk.
        self._is_abandoned = True
        self._drained.set()
        self.finish()
        with self._changed:
            # Their senders wait without a deadline, perhaps: they find them not whole.
            for large in self._large:
                large.has_left.set()

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until a finished queue is empty; return whether it is."""
        return self._drained.wait(timeout_s)

    def _with_others(self, first: bytes) -> bytes:
        """Return a small message, with those that wait behind it and fit."""
        taken, num_bytes = [first], len(first)
        while not self._waiting.empty():
            following = self._waiting.get()
            # One thread takes, so what it puts back is the last item again.
            if following is None:
                self._waiting.put(None)  # the end: `take` meets it
                break
            if isinstance(following, _Large) or (
                num_bytes + len(following) > CHUNK_BYTES
            ):
                self._next = following
                break
            taken.append(following)
            num_bytes += len(following)
        with self._changed:
            self._num_bytes -= num_bytes
            if self._are_waiting:
                self._changed.notify_all()
        return first if len(taken) == 1 else b"".join(taken)

    def _next_of(self, large: _Large) -> bytes | None:
        with self._changed:
            if large.is_withdrawn:
                return None
            # Before a chunk is cut: a sender that gives up from now on must abandon
            # the queue.
            large.has_begun = True
        # Copies from the sender's arrays, without the lock: small messages may be put.
        chunk = next(large.chunks, None)
        if chunk is None:
            with self._changed:
                self._large.discard(large)
                large.has_left.set()
        return chunk

    def _wait_for_room(self, deadline: float | None) -> None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        # Counted so that `_with_others` notifies only if anybody waits.
        self._are_waiting += 1
        self._changed.wait(left_s)
        self._are_waiting -= 1


class Incoming:
    """Messages that arrived and were not received: `WAITING_BYTES`, or a larger one.

    First come the chunks of a handshake, one at a time: the stream is read no further
    than its next step needs. From `start` on they are cut into messages.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._frames: queue.SimpleQueue[MessageFrame | None] = queue.SimpleQueue()
        # Guards the numbers and flags below, for the stream's thread, which waits for
        # room, and the receiver. The two queues need no lock; no other lock is taken
        # under it.
        self._changed = threading.Condition()
        self._is_waiting = False
        self._wants_chunk = False
        self._reader: FrameReader | None = None
        self._num_bytes = 0
        self._is_open = True
        self._discards = False
        self._ended = threading.Event()
        self.failure: Exception | None = None

    def next_chunk(self, deadline: float) -> bytes:
        """Read and return the next chunk; before `start`.

        Raises:
          ClosedError: There are no more; `failure` is the error, if there was one.
          TimeoutError: None came in time.
        """
        with self._changed:
            # The stream's thread reads one more chunk, and no further: a stranger can
            # make us hold one.
            self._wants_chunk = True
            self._changed.notify_all()
        return _get(self._chunks, deadline - time.monotonic())

    def start(self, reader: FrameReader) -> None:
        """Cut the stream into messages from here on."""
        with self._changed:
            self._reader = reader
            self._changed.notify_all()

    def next_frame(self, timeout_s: float | None) -> MessageFrame:
        """Return the next message; after `start`.

        Raises:
          ClosedError: There are no more; `failure` is the error, if there was one.
          TimeoutError: None came in time.
        """
        # Outside of the lock: the stream's thread needs it to add a message.
        frame = _get(self._frames, timeout_s)
        with self._changed:
            self._num_bytes -= _size(frame)
            if self._is_waiting:
                self._changed.notify_all()
        return frame

    def has_some(self) -> bool:
        """Return whether `next_frame` has an answer without waiting."""
        return not self._frames.empty()

    def fill_from(self, stream: Iterator[bytes]) -> bool:
        """Read the stream to its end, no further ahead than there is room.

        Returns:
          Whether it came to its end; else `stop` was called.
        """
        # In a thread of its own, which waits inside of gRPC with no lock held.
        try:
            while self._wait_for_room():
                self._add(next(stream))
            return False
        except StopIteration:
            return True
        except Exception as failure:  # raised in the thread that receives
            # Before `stop` below wakes that thread, which reads it.
            self.failure = failure.with_traceback(None)
            return True
        finally:
            self.stop()
            self._ended.set()

    def discard(self) -> None:
        """Drop the rest of the stream, but read it to its end; wake the receiver."""
        with self._changed:
            self._discards = True
            self._changed.notify_all()
        # The end, for a receiver that waits; `_get` leaves it there for the next.
        self._chunks.put(None)
        self._frames.put(None)

    def stop(self) -> None:
        """Read no more of the stream; wake the receiver."""
        self._is_open = False
        self.discard()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the stream has ended; return whether it has."""
        return self._ended.wait(timeout_s)

    def _wait_for_room(self) -> bool:
        with self._changed:
            while self._is_open and not self._has_room():
                self._is_waiting = True
                self._changed.wait()
                self._is_waiting = False
            return self._is_open

    def _has_room(self) -> bool:
        if self._discards:
            return True
        if self._reader is None:
            return self._wants_chunk
        # A large message is read when those before it were received.
        is_large = self._reader.target is not None
        return self._num_bytes < WAITING_BYTES and not (is_large and self._num_bytes)

    def _add(self, chunk: bytes) -> None:
        if self._discards:
            return
        if self._reader is None:
            self._wants_chunk = False
            self._chunks.put(chunk)
            return
        # Counted before it is put: the receiver subtracts it as soon as it is there.
        for frame in _cut(self._reader, chunk):
            with self._changed:
                self._num_bytes += _size(frame)
            self._frames.put(frame)


def _get(arrived: "queue.SimpleQueue[T | None]", timeout_s: float | None) -> T:
    try:
        item = arrived.get(timeout=None if timeout_s is None else max(timeout_s, 0.0))
    except queue.Empty:
        raise TimeoutError from None
    if item is None:
        arrived.put(None)  # for the next call
        raise ClosedError
    return item


def _cut(reader: FrameReader, chunk: bytes) -> Iterator[MessageFrame]:
    """Yield the messages that a chunk completes."""
    rest = memoryview(chunk)
    while rest and (target := reader.target) is not None:
        part = rest[: len(target)]
        target[: len(part)] = part
        rest = rest[len(part) :]
        frame = reader.filled(len(part))
        if frame is not None:
            yield frame
    if rest:
        reader.feed(chunk if len(rest) == len(chunk) else bytes(rest))
    while (frame := reader.next_frame()) is not None:
        yield frame


def _size(frame: MessageFrame) -> int:
    return len(frame.head) + len(frame.body)
