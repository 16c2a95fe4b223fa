"""Move messages over a Unix socket, and large arrays beside it through shared memory.

A small message costs one system call to send and one to receive. Senders try without
waiting, and wait with `poll` only if the socket is full. The receiver looks for a while
if messages come quickly (`adaptive_spin`), then waits inside of `recv`, with the
socket's own timeout: that is set anew only when the caller's leaves the range of one to
two times what is set, so nearly never.
"""

import contextlib
import itertools
import math
import mmap
import select
import socket
import struct
import threading
import time
from collections import deque

import numpy as np

from replicator.base.host.forks import register_fork_drop
from replicator.base.types import PyTree
from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DecodeError,
    MessageTooLargeError,
)
from replicator.rpc.adaptive_spin import SHORT_S, AdaptiveSpin
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.protocols import Message
from replicator.rpc.transports.frames import (
    READ_BYTES,
    Buffer,
    FrameReader,
    MessageFrame,
    check_fits,
    frame_with_buffers,
    frame_with_shared_body,
    frame_without_buffers,
    lay_out,
    refuse_shared,
)
from replicator.rpc.transports.payloads import EncodedPayload, Encoding
from replicator.rpc.transports.same_host.common_body import kept_layout
from replicator.rpc.transports.same_host.shared_memory import (
    SHARED_FROM_BYTES,
    SharedMemory,
)
from replicator.rpc.transports.same_host.unread_bytes import UnreadBytes

_DO_NOT_WAIT = socket.MSG_DONTWAIT
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_PARTS_AT_ONCE = 512  # below the system's IOV_MAX
_LONGEST_WAIT = 20  # as a power of two, in seconds
_SHORTEST_WAIT = -9
_LONGEST_POLL_S = 3600.0
_new_tuple = tuple.__new__  # a named one at half the price


class UnixConnection:
    """One end of an authenticated connection; see `Connection`.

    Attributes:
      peer: The other end, for people: the socket's path, and a process id where known.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str,
        encoding: Encoding,
        shared: SharedMemory | None,
    ) -> None:
        """Take over a socket whose handshake is done.

        Args:
          sock: Blocking socket; this object closes it.
          peer: Name of the other end, for people.
          encoding: Encoding of values.
          shared: Shared memory of the connection; None: there is none.
        """
        self._socket = sock
        self.peer = peer
        self._encoding = encoding
        self._shared = shared
        self._unread = UnreadBytes(sock, peer=peer)
        # Held over a whole frame, also while waiting for room, so that frames do not
        # mix; and while the socket is closed, so that none is closed under a `send`.
        # The lock of shared memory is released before. Its holder may wait for room,
        # until its deadline.
        self._send_lock = threading.Lock()
        self._send = sock.send
        self._receive_into = sock.recv_into
        # `recv` would allocate new memory for each message, before it waits: over hours
        # this fragments a server's heap. Pages of this that no message needs are never
        # made. Private, anonymous: written by the reading thread, freed with us.
        self._received = memoryview(mmap.mmap(-1, READ_BYTES, flags=_PRIVATE))
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._waits = AdaptiveSpin(poller.poll)
        # Written by the reading thread, and by `close` of any thread; each writes its
        # own flag, then reads the other's, so that one of the two closes the socket.
        self._is_receiving = False
        self._is_closed = False
        self._reason = ""
        # Of the reading thread alone.
        self._wait: int | None = None  # what the socket has, as a power of two
        self._bounded_s: float | None = None  # what it was set for
        open_shared = refuse_shared if shared is None else shared.open
        self._reader = FrameReader(encoding.limits, open_shared=open_shared)
        register_fork_drop(self)

    def send(
        self, kind: int, call_id: int, value: PyTree, *, timeout_s: float | None
    ) -> int:
        """Send one message whole; return its bytes. See `Connection`."""
        head, buffers, num_bytes = self._encoding.encode(value)
        if buffers:
            kept = value if type(value) is EncodedOnce else None
            self._send_with_buffers(kind, call_id, head, buffers, timeout_s, kept)
        else:
            self._send_bytes(frame_without_buffers(kind, call_id, head), timeout_s)
        return num_bytes

    def memory(self, num_bytes: int) -> np.ndarray | None:
        """Return shared memory for the long arrays of one message. See `Connection`."""
        if self._shared is None or num_bytes < SHARED_FROM_BYTES:
            return None
        return self._shared.reserve(num_bytes)

    def receive(self, *, timeout_s: float | None) -> Message:
        """Return the next message. See `Connection`."""
        # In this order, as `close` looks at them in the other one.
        self._is_receiving = True
        try:
            reader = self._reader
            frame = reader.next_frame() if reader.rest else None
            if frame is None:
                frame = self._receive_frame(timeout_s)
        except (DecodeError, MessageTooLargeError) as error:
            raise self._lost(f"sent an invalid message: {error}") from error
        except MemoryError as error:
            raise self._lost("sent more than there is memory for") from error
        finally:
            # Before `_is_closed` is looked at: the later of this and `close` closes.
            self._is_receiving = False
            if self._is_closed:
                self._close_when_idle()
        # Decoded in the thread that takes the payload.
        kind, call_id, head, body = frame
        payload = EncodedPayload(head, body, self._encoding)
        return _new_tuple(Message, (kind, call_id, payload))

    def has_received(self) -> bool:
        """Return whether `receive` has a message, or an error, without waiting."""
        return bool(self._reader.rest) and self._reader.has_frame()

    def fileno(self) -> int | None:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it; a `receive` or `send` that waits raises. May be called twice."""
        self._reason = self._reason or "was closed by this end"
        # Before `shutdown`, which wakes threads inside of a call; they look at this.
        self._is_closed = True
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._close_when_idle()

    def drop_after_fork(self) -> None:
        """Close a forked child's descriptors; its parent goes on. See `forks`."""
        # No lock is taken: a thread of the parent may have held it.
        self._reason = self._reason or "is for the process that this was forked from"
        self._is_closed = True
        self._socket.close()  # no `shutdown`, which would be for both
        if self._shared is not None:
            self._shared.drop_after_fork()

    def _close_when_idle(self) -> None:
        """Give descriptors back, unless a thread is inside of a call with them.

        That thread wakes up, and comes here again.
        """
        if not self._is_receiving and self._send_lock.acquire(False):
            try:
                self._socket.close()
                if self._shared is not None:
                    self._shared.close()
            finally:
                self._send_lock.release()

    # Receiving.

    def _receive_frame(self, timeout_s: float | None) -> MessageFrame:
        if timeout_s == 0:  # the selector has reported data: no wait
            frame = None if self._is_closed else self._read(_DO_NOT_WAIT)
        else:
            frame = self._wait_for_frame(timeout_s)
        if frame is not None:
            return frame
        if self._is_closed:
            raise self._lost("was closed")
        raise CallTimeoutError(f"{self.peer} sent no message within {timeout_s:g} s.")

    def _wait_for_frame(self, timeout_s: float | None) -> MessageFrame | None:
        """Return None if it is late, or the connection was closed."""
        started_s = time.monotonic()
        if timeout_s is None or timeout_s > SHORT_S:
            self._waits.begin(started_s)
        remaining_s = timeout_s
        while not self._is_closed:
            is_set = remaining_s == self._bounded_s
            frame = self._read(0 if is_set else self._wait_at_most(remaining_s))
            if frame is not None:
                self._waits.end(started_s)
                return frame
            if timeout_s is not None:
                remaining_s = started_s + timeout_s - time.monotonic()
                if remaining_s <= 0:
                    return None
        return None

    def _read(self, flags: int) -> MessageFrame | None:
        """Receive once; return the frame that is whole now, if one is."""
        # The holder of the right to read alone is here: no lock.
        reader = self._reader
        target = reader.target
        into = self._received if target is None else target
        try:
            num_bytes = self._receive_into(into, 0, flags)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise self._lost(f"is gone ({error})") from error
        # The kernel closes the socket of a process that dies, however it dies.
        if not num_bytes:
            raise self._ended()
        if target is None:
            return reader.read(bytes(into[:num_bytes]))
        return reader.filled(num_bytes)

    def _ended(self) -> ConnectionLostError:
        if self._reader.is_between_frames:
            return self._lost("closed the connection")
        return self._lost("closed the connection in the middle of a message")

    def _wait_at_most(self, timeout_s: float | None) -> int:
        """Bound the next `recv` by `timeout_s`, or half of it; return its flags."""
        if timeout_s is None:
            wait = None
        elif timeout_s <= 0:
            return _DO_NOT_WAIT
        else:
            wait = math.frexp(timeout_s)[1] - 1
            wait = min(max(wait, _SHORTEST_WAIT), _LONGEST_WAIT)
        if wait != self._wait:
            seconds, fraction = divmod(0.0 if wait is None else 2.0**wait, 1)
            option = struct.pack("ll", int(seconds), int(fraction * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, option)
            self._wait = wait
        self._bounded_s = timeout_s
        return 0

    def _lost(self, what: str) -> ConnectionLostError:
        """Close; return the error with this reason, or that of an earlier close."""
        if not self._is_closed:
            self._reason = what
            self.close()
        return ConnectionLostError(
            f"The connection is lost: {self.peer} {self._reason}."
        )

    # Sending.

    def _send_with_buffers(
        self,
        kind: int,
        call_id: int,
        head: bytes,
        buffers: list[memoryview],
        timeout_s: float | None,
        kept: EncodedOnce | None,
    ) -> None:
        layout = lay_out(buffers) if kept is None else kept_layout(kept, buffers)
        if len(buffers) > 1:
            check_fits(head, layout, self._encoding.limits)
        shared, num_bytes = self._shared, layout.num_bytes
        if shared is not None and num_bytes >= SHARED_FROM_BYTES:
            # Before a slot is taken: a thread that waits here holds none.
            self._unread.add(num_bytes, timeout_s=timeout_s)
            where = shared.place(layout) if kept is None else shared.lend(kept, layout)
            if where is not None:
                frame = frame_with_shared_body(
                    kind, call_id, head, num_bytes=num_bytes, where=where
                )
                # The slot is the receiver's once the frame is sent; else it is ours.
                try:
                    self._send_bytes(frame, timeout_s)
                except BaseException:
                    shared.take_back(where)
                    raise
                return
        parts = frame_with_buffers(kind, call_id, head, layout=layout)
        if len(parts) == 1:
            self._send_bytes(parts[0], timeout_s)
        else:
            self._send_parts(parts, timeout_s)

    def _send_bytes(self, frame: Buffer, timeout_s: float | None) -> None:
        """Send a frame: nearly always with one call that does not wait."""
        # Without waiting: nearly always no other thread sends.
        lock = self._send_lock
        if not lock.acquire(False):
            self._send_parts([frame], timeout_s)
            return
        try:
            try:
                sent = self._send(frame, _DO_NOT_WAIT)
            except OSError as error:
                sent = self._sent_nothing(error)
            if sent != len(frame):
                rest = memoryview(frame)[sent:]
                self._send_rest([rest], _deadline(timeout_s), sent > 0)
        finally:
            # Before `_is_closed` is looked at: `close` sets that, then tries the lock.
            lock.release()
            if self._is_closed:
                self._close_when_idle()

    def _send_parts(self, parts: list[Buffer], timeout_s: float | None) -> None:
        """Send a frame after those of other threads; wait while the socket is full."""
        deadline = _deadline(timeout_s)
        patience_s = -1 if timeout_s is None else max(timeout_s, 0)
        if not self._send_lock.acquire(timeout=patience_s):
            raise CallTimeoutError(
                f"Others were sending to {self.peer} for {timeout_s:g} s, and it does "
                "not read. Nothing of this message was sent."
            )
        try:
            self._send_rest(parts, deadline, False)
        finally:
            self._send_lock.release()
            if self._is_closed:
                self._close_when_idle()

    def _send_rest(self, parts: list[Buffer], deadline: float, is_begun: bool) -> None:
        """Send what is left of a frame, with the lock held."""
        # Arrays are sent from where they lie; the kernel copies them.
        views = deque(memoryview(part) for part in parts)
        try:
            while views:
                some = list(itertools.islice(views, _PARTS_AT_ONCE))
                try:
                    sent = self._socket.sendmsg(some, (), _DO_NOT_WAIT)
                except OSError as error:
                    sent = self._sent_nothing(error)
                    self._wait_for_room(deadline)
                is_begun = is_begun or sent > 0
                while views and sent >= len(views[0]):
                    sent -= len(views.popleft())
                if sent:
                    views[0] = views[0][sent:]
        except BaseException:  # also Ctrl-C
            if is_begun and not self._is_closed:
                # What would follow could not be read.
                self._reason = "was sent half of a message, and took no more"
                self.close()
            raise

    def _sent_nothing(self, error: OSError) -> int:
        """Return 0 if that was for want of room; else the connection is lost."""
        if isinstance(error, BlockingIOError):
            return 0
        raise self._lost(f"is gone ({error})") from error

    def _wait_for_room(self, deadline: float) -> None:
        """Wait; return also if there may still be none, but time is left."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise CallTimeoutError(
                f"{self.peer} does not read: there was no room for a message, or for "
                "all of it, within its time."
            )
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLOUT)
        poller.poll(min(remaining, _LONGEST_POLL_S) * 1e3 + 1)


def _deadline(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else time.monotonic() + timeout_s
