"""A connection over anything that moves chunks of bytes in order, both ways.

It frames messages as the Unix socket does and cuts the frames into chunks, so a message
has no size that the stream must allow; small messages share chunks. Large bodies are
put together in pooled memory. It knows no gRPC, and its tests need none.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DecodeError,
    MessageTooLargeError,
)
from replicator.protocols import PyTree
from replicator.rpc import codec
from replicator.rpc.message_limits import MessageLimits
from replicator.rpc.protocols import Message
from replicator.rpc.registry import Registry
from replicator.rpc.transports import frames
from replicator.rpc.transports.chunk_queues import (
    CHUNK_BYTES,
    ClosedError,
    Incoming,
    Outgoing,
)
from replicator.rpc.transports.receive_buffers import ReceiveBuffers

# What a good end may take: our last words leave, and the other end says it is done.
_DRAIN_S = 0.5
_END_S = 0.25


class ChunkedConnection:
    """One authenticated connection; see `protocols.Connection`."""

    def __init__(
        self,
        peer: str,
        *,
        incoming: Incoming,
        outgoing: Outgoing,
        registry: Registry,
        limits: MessageLimits,
        buffers: ReceiveBuffers,
        cut_off: Callable[[], None],
    ) -> None:
        """Join two queues to a connection.

        Args:
          peer: Who is at the other end.
          incoming: Where the stream puts what arrives.
          outgoing: Where the stream takes what is to leave.
          registry: Types of messages besides the plain ones.
          limits: Of messages.
          buffers: Memory for large bodies.
          cut_off: Ends the stream at once; may be called at any time.
        """
        self._peer = peer
        self._incoming = incoming
        self._outgoing = outgoing
        self._registry = registry
        self._limits = limits
        self._cut_off = cut_off
        self._sending = threading.Lock()
        self._reader = frames.FrameReader(
            limits, allocate=buffers.lend, open_shared=_refuse_shared
        )
        self._is_closed = False

    @property
    def peer(self) -> str:
        """Name the other end for people."""
        return self._peer

    def send(
        self, kind: int, call_id: int, value: PyTree, *, timeout_s: float | None
    ) -> int:
        """Send one message whole; see `protocols.Connection`."""
        encoded = codec.encode(value, registry=self._registry, limits=self._limits)
        chunks = _cut(_frame(kind, call_id, encoded))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise self._nobody_reads(timeout_s)
        number = 0
        try:
            for number, chunk in enumerate(chunks):
                self._outgoing.put(chunk, deadline=deadline)
        except ClosedError:
            raise self._lost() from None
        except TimeoutError:
            if number:
                # Part of a message has left: what would follow could not be read.
                self._end()
            raise self._nobody_reads(timeout_s) from None
        finally:
            self._sending.release()
        return encoded.num_bytes

    def receive(self, *, timeout_s: float | None) -> Message:
        """Return the next message; see `protocols.Connection`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            frame = self._reader.next_frame()
            while frame is None:
                left = None if deadline is None else deadline - time.monotonic()
                chunk = self._incoming.get(None if left is None else max(left, 0.0))
                frame = self._feed(chunk) or self._reader.next_frame()
        except ClosedError:
            raise self._lost() from None
        except TimeoutError:
            raise CallTimeoutError(
                f"No message came from {self._peer} within {timeout_s} s."
            ) from None
        except (DecodeError, MessageTooLargeError) as failure:
            self._end()
            raise ConnectionLostError(
                f"{self._peer} sent what is no message, and was cut off: {failure}"
            ) from failure
        payload = codec.EncodedPayload(
            frame.head, frame.buffers, registry=self._registry, limits=self._limits
        )
        return Message(frame.kind, frame.call_id, payload)

    def has_received(self) -> bool:
        """Tell whether `receive` has something to work on without waiting."""
        return self._reader.has_frame() or self._incoming.has_some()

    def fileno(self) -> int | None:
        """Return None: there is nothing to `select` on."""
        return None

    def close(self) -> None:
        """Close it: what was sent leaves, within a bound; a waiting `receive` raises."""
        if self._is_closed:
            return
        self._is_closed = True
        self._incoming.stop()
        self._outgoing.finish()
        if self._outgoing.wait_drained(_DRAIN_S):
            self._incoming.wait_ended(_END_S)
        self._end()

    def _feed(self, chunk: bytes) -> frames.Frame | None:
        """Take a chunk; return the large frame that it completes, if it does."""
        if self._reader.target is None:
            self._reader.feed(chunk)
            return None
        frame, rest = None, memoryview(chunk)
        while rest and frame is None and (target := self._reader.target) is not None:
            part = rest[: len(target)]
            target[: len(part)] = part
            frame = self._reader.filled(len(part))
            rest = rest[len(part) :]
        if rest:
            self._reader.feed(bytes(rest))
        return frame

    def _end(self) -> None:
        self._incoming.stop()
        self._outgoing.abandon()
        self._cut_off()

    def _lost(self) -> ConnectionLostError:
        if self._is_closed:
            return ConnectionLostError(f"The connection to {self._peer} was closed.")
        why = self._incoming.failure
        return ConnectionLostError(
            f"{self._peer} is gone{'.' if why is None else f': {why}'}"
        )

    def _nobody_reads(self, timeout_s: float | None) -> CallTimeoutError:
        return CallTimeoutError(f"{self._peer} did not read for {timeout_s} s.")


def _frame(
    kind: int, call_id: int, encoded: codec.Encoded
) -> Sequence[frames.Buffer]:
    if not encoded.buffers:
        return [frames.frame_without_buffers(kind, call_id, encoded.head)]
    layout = frames.lay_out(encoded.buffers)
    return frames.frame_with_buffers(
        kind, call_id, encoded.head, layout=layout, where=None
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


def _refuse_shared(where: frames.Where, num_bytes: int) -> NoReturn:
    raise DecodeError("A frame from another host must hold its arrays, got a segment.")
