"""A connection over anything that moves chunks of bytes in order, both ways.

It frames messages as the Unix socket does and cuts the frames into chunks, so a message
has no size that the stream must allow; small messages share chunks. It knows no gRPC,
and its tests need none.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from replicator.base.types import PyTree
from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DecodeError,
    MessageTooLargeError,
)
from replicator.rpc.protocols import Message
from replicator.rpc.transports import frames
from replicator.rpc.transports.between_hosts.chunk_queues import (
    CHUNK_BYTES,
    WAITING_BYTES,
    Outgoing,
    start_thread,
)
from replicator.rpc.transports.bounded_queue import BoundedQueue
from replicator.rpc.transports.payloads import EncodedPayload, Encoding

# What a good end may take: our last words leave, and the other end says it is done.
_DRAIN_S = 1.0
_END_S = 3.0


class ChunkedConnection:
    """One authenticated connection; see `protocols.Connection`."""

    def __init__(
        self,
        peer: str,
        *,
        stream: Iterator[bytes],
        outgoing: Outgoing,
        encoding: Encoding,
        cut_off: Callable[[], None],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to read a stream whose handshake is done.

        Args:
          peer: Who is at the other end.
          stream: What arrives; raises EOFError, and why, if it was cut off.
          outgoing: Where the stream takes what is to leave.
          encoding: How values become bytes.
          cut_off: Ends the stream at once; may be called at any time.
          let_go: Called in its place when the stream has ended by itself.
        """
        self._peer = peer
        # Filled by a thread of this connection, which alone reads the stream.
        self._incoming: BoundedQueue[frames.Frame] = BoundedQueue(
            WAITING_BYTES, size=lambda frame: len(frame.head) + len(frame.body)
        )
        # Why it ended, if not well; written before the queue ends, which wakes readers.
        self._failure: Exception | None = None
        self._has_ended = threading.Event()
        self._outgoing = outgoing
        self._encoding = encoding
        self._cut_off = cut_off
        self._let_go = let_go
        self._is_closed = False
        start_thread(
            "read", lambda: self._read(stream, frames.FrameReader(encoding.limits))
        )

    @property
    def peer(self) -> str:
        """Name the other end for people."""
        return self._peer

    def send(
        self, kind: int, call_id: int, value: PyTree, *, timeout_s: float | None
    ) -> int:
        """Send one message whole; see `protocols.Connection`."""
        head, buffers, num_bytes = self._encoding.encode(value)
        frame = self._frame(kind, call_id, head, buffers)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if sum(map(len, frame)) <= CHUNK_BYTES:
                self._outgoing.put(b"".join(frame), deadline=deadline)
            else:
                self._outgoing.put_large(_cut(frame), deadline=deadline)
        except EOFError:
            raise self._lost() from None
        except TimeoutError:
            raise self._nobody_reads(timeout_s) from None
        return num_bytes

    def receive(self, *, timeout_s: float | None) -> Message:
        """Return the next message; see `protocols.Connection`."""
        if self._is_closed:
            raise self._lost()
        try:
            frame = self._incoming.take(timeout_s)
        except EOFError:
            raise self._lost() from None
        except TimeoutError:
            raise CallTimeoutError(
                f"No message came from {self._peer} within {timeout_s} s."
            ) from None
        payload = EncodedPayload(frame.head, frame.body, self._encoding)
        return Message(frame.kind, frame.call_id, payload)

    def has_received(self) -> bool:
        """Tell whether `receive` has something to work on without waiting."""
        return bool(self._incoming)

    def fileno(self) -> int | None:
        """Return None: there is nothing to `select` on."""
        return None

    def close(self) -> None:
        """Close it; what was sent leaves, within a bound. See `protocols`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._incoming.end(drop=True)  # the stream is read to its end all the same
        self._outgoing.finish()
        if self._outgoing.wait_drained(_DRAIN_S) and self._has_ended.wait(_END_S):
            # To cut it off now would take back last words that are on the wire.
            self._let_go()
        else:
            self._end()

    def _read(self, stream: Iterator[bytes], reader: frames.FrameReader) -> None:
        """Cut what arrives into messages until the stream ends; nothing leaves then."""
        try:
            for chunk in stream:
                self._add(chunk, reader)
                del chunk  # before the next one takes memory
                if reader.target is not None:
                    # A large message is read when those before it were received.
                    self._incoming.wait_empty()
        except Exception as failure:  # told by who receives
            self._failure = failure.with_traceback(None)
        finally:
            self._incoming.end()
            self._outgoing.abandon()
            self._has_ended.set()

    def _add(self, chunk: bytes, reader: frames.FrameReader) -> None:
        # Of its own, as it must hold no frame while the next chunk is waited for.
        with contextlib.suppress(EOFError):  # nobody wants it any more
            for frame in _frames_of(chunk, reader):
                self._incoming.put(frame, None)

    def _frame(
        self, kind: int, call_id: int, head: bytes, buffers: Sequence[memoryview]
    ) -> Sequence[frames.Buffer]:
        if not buffers:
            return [frames.frame_without_buffers(kind, call_id, head)]
        layout = frames.lay_out(buffers)
        frames.check_fits(head, layout, self._encoding.limits)
        return frames.frame_with_buffers(kind, call_id, head, layout=layout)

    def _end(self) -> None:
        self._incoming.end(drop=True)
        self._outgoing.abandon()
        self._cut_off()

    def _lost(self) -> ConnectionLostError:
        if not self._is_closed:  # else `close` lets our last words leave first
            self._end()
        why = self._failure
        if self._is_closed:
            told = "was closed by this end"
        elif isinstance(why, DecodeError | MessageTooLargeError):
            told = f"sent what is no message, and was cut off: {why}"
        else:
            told = f"is gone: {why or 'it closed the connection'}"
        return ConnectionLostError(f"The connection is lost: {self._peer} {told}.")

    def _nobody_reads(self, timeout_s: float | None) -> CallTimeoutError:
        told = f"{self._peer} did not read for {timeout_s} s"
        if self._outgoing.is_open:
            return CallTimeoutError(f"{told}. Nothing of this message was sent.")
        self._end()
        return CallTimeoutError(
            f"{told}, and has a part of a message. The connection was closed."
        )


def _frames_of(chunk: bytes, reader: frames.FrameReader) -> Iterator[frames.Frame]:
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


def _cut(parts: Sequence[frames.Buffer]) -> Iterator[bytes]:
    """Yield the bytes of `parts` in chunks; they are copied, once."""
    waiting: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        rest = memoryview(part)
        while len(rest) >= room:
            yield b"".join([*waiting, rest[:room]])
            rest, waiting, room = rest[room:], [], CHUNK_BYTES
        if rest:
            waiting.append(rest)
            room -= len(rest)
    if waiting:
        yield b"".join(waiting)
