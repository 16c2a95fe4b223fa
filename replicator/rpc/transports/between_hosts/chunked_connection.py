"""A connection over anything that moves chunks of bytes in order, both ways.

It frames messages as the Unix socket does and cuts the frames into chunks, so a message
has no size that the stream must allow; small messages share chunks. It knows no gRPC,
and its tests need none.
"""

import dataclasses
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
    ClosedError,
    Incoming,
    Outgoing,
)
from replicator.rpc.transports.payloads import EncodedPayload, Encoding

# Seconds of a good end: for our last messages to leave, and for the other end's end.
_DRAIN_S = 1.0
_END_S = 3.0


@dataclasses.dataclass(eq=False)
class ChunkedConnection:
    """One authenticated connection; see `protocols.Connection`.

    Attributes:
      peer: Name of the other end, for people.
      incoming: Queue of the chunks that arrive.
      outgoing: Queue of the chunks to send.
      encoding: Encoding of values.
      cut_off: Ends the stream at once; may be called at any time.
      release: Frees the stream once it has ended by itself; then `cut_off` is not
        called.
    """

    peer: str
    _: dataclasses.KW_ONLY
    incoming: Incoming
    outgoing: Outgoing
    encoding: Encoding
    cut_off: Callable[[], None]
    release: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # Set once, by `close`; other threads find their queues ended.
        self._is_closed = False
        # The stream's thread cuts messages from here on; it alone uses the reader.
        self.incoming.start(frames.FrameReader(self.encoding.limits))

    def send(
        self, kind: int, call_id: int, value: PyTree, *, timeout_s: float | None
    ) -> int:
        """Send one message whole; see `protocols.Connection`."""
        head, buffers, num_bytes = self.encoding.encode(value)
        frame = self._frame(kind, call_id, head, buffers)
        # Arrays are read until the message has left: the caller waits in `put_large`.
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            # A large one is cut by the writing thread, which copies it piece by piece.
            if sum(map(len, frame)) <= CHUNK_BYTES:
                self.outgoing.put(b"".join(frame), deadline=deadline)
            else:
                self.outgoing.put_large(_cut(frame), deadline=deadline)
        except ClosedError:
            raise self._lost() from None
        except TimeoutError:
            raise self._nobody_reads(timeout_s) from None
        return num_bytes

    def memory(self, num_bytes: int) -> None:
        """Return None: it has none that the other end sees."""

    def receive(self, *, timeout_s: float | None) -> Message:
        """Return the next message; see `protocols.Connection`."""
        if self._is_closed:
            raise self._lost()
        try:
            frame = self.incoming.next_frame(timeout_s)
        except ClosedError:
            raise self._lost() from None
        except TimeoutError:
            raise CallTimeoutError(
                f"No message came from {self.peer} within {timeout_s} s."
            ) from None
        payload = EncodedPayload(frame.head, frame.body, self.encoding)
        return Message(frame.kind, frame.call_id, payload)

    def has_received(self) -> bool:
        """Return whether `receive` has data to work on without waiting."""
        return self.incoming.has_some()

    def fileno(self) -> int | None:
        """Return None: there is nothing to `select` on."""
        return None

    def close(self) -> None:
        """Close it; what was sent leaves, within a bound. See `protocols`."""
        # Two threads may pass this at once: each step below may be made twice.
        if self._is_closed:
            return
        self._is_closed = True
        self.incoming.discard()
        self.outgoing.finish()
        if self.outgoing.wait_drained(_DRAIN_S) and self.incoming.wait_ended(_END_S):
            # To cut it off now would drop last messages that are on the wire.
            self.incoming.stop()
            self.outgoing.abandon()
            self.release()
        else:
            self._end()

    def _frame(
        self, kind: int, call_id: int, head: bytes, buffers: Sequence[memoryview]
    ) -> Sequence[frames.Buffer]:
        if not buffers:
            return [frames.frame_without_buffers(kind, call_id, head)]
        layout = frames.lay_out(buffers)
        frames.check_fits(head, layout, self.encoding.limits)
        return frames.frame_with_buffers(kind, call_id, head, layout=layout)

    def _end(self) -> None:
        # The queues first: their threads must not wait when the stream has ended.
        self.incoming.stop()
        self.outgoing.abandon()
        self.cut_off()

    def _lost(self) -> ConnectionLostError:
        if not self._is_closed:  # else `close` lets our last messages leave first
            self._end()
        why = self.incoming.failure
        if self._is_closed:
            reason = "was closed by this end"
        elif isinstance(why, DecodeError | MessageTooLargeError):
            reason = f"sent an invalid message, and was cut off: {why}"
        else:
            reason = f"is gone: {why or 'it closed the connection'}"
        return ConnectionLostError(f"The connection is lost: {self.peer} {reason}.")

    def _nobody_reads(self, timeout_s: float | None) -> CallTimeoutError:
        text = f"{self.peer} did not read for {timeout_s} s"
        if self.outgoing.is_open:
            return CallTimeoutError(f"{text}. Nothing of this message was sent.")
        self._end()
        return CallTimeoutError(
            f"{text}, and has a part of a message. The connection was closed."
        )


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
