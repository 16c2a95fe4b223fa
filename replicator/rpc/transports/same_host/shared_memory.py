"""Carry large arrays between two processes of a host with one copy: into shared memory.

The sender of a message owns the memory. It makes *segments* with `memfd_create`:
without a name, so that nothing is left when both processes are killed; sealed, so that
neither end can shrink one under the other (a SIGBUS), grow it, or, for the receiver,
map it to write. It cuts each into *slots* of one size, copies the body of a message
into a free slot, and sends the segment's number and the slot's place.

Only the sender may reuse a slot, after the receiver has *released* it.
The receiver does so when the last array, view or payload of the message has died (each
keeps one owner object alive; a weak reference to it tells), in whatever thread that
happens. Until then the sender does not touch the slot. A segment all of whose slots are
free may be dropped to make room for one of another size.

A release is a number that the receiver writes on its *board*, a page that the sender
can only read: how often the slot had been used. So it takes no system call, no lock and
nobody's time, and is seen when a slot is looked for. (Between the last look at an array
and the writing of the number lie some thousand instructions: more than a processor may
hold back a load for. And the sender writes to the slot only after it has read it.)

A body for many receivers is in memory of its own (`CommonBody`): a segment that its
receivers share, and that is lent whole, any number of times. It is written once, before
any frame names it, and again when all of its receivers have released it. None of them
can write to it.

Where a process dies: its segments live on until the other end, which has mapped them,
drops the last array; what it had borrowed counts as lent until the connection, which
the kernel ends, is closed.

Boards change hands in the handshake. Segments travel beside the messages, over a socket
pair of their own, so that the messages' socket never has to look for descriptors:

    attach number, bytes, and the descriptor        detach number

A receiver trusts nothing of that: it asks the kernel for size and seals before it maps,
maps to read only, and refuses more than its bound. Linux only; elsewhere, and past the
bound, and where memory is short, the socket takes the arrays.
"""

import array
import logging
import mmap
import os
import socket
import struct
import threading
import weakref
from collections import deque

import numpy as np

from replicator.errors import DecodeError
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.transports.frames import Buffer, BufferLayout, Where
from replicator.rpc.transports.same_host.common_body import copy_body, kept_body
from replicator.rpc.transports.same_host.incoming_segments import IncomingSegments
from replicator.rpc.transports.same_host.outgoing_segments import (
    CommonMemory,
    OutgoingSegments,
    Segment,
    Slot,
)

SHARED_FROM_BYTES = 1 << 15
"""Bodies of this size and more go by shared memory: from here on it is quicker."""
BOARD_BYTES = 1 << 16
"""4 for each slot."""
_LOCK_TIMEOUT_S = 1.0
_ATTACH = struct.Struct("<cIQ")
_DETACH = struct.Struct("<cI")
_log = logging.getLogger(__name__)


class SharedMemory:
    """The shared memory of one connection, both ways.

    Attributes:
      open: Returns read-only bytes that the other end placed; see `IncomingSegments`.
    """

    def __init__(
        self,
        channel: socket.socket,
        *,
        board: mmap.mmap,
        peers_board: mmap.mmap,
        send_bytes: int,
        receive_bytes: int,
        peer: str,
    ) -> None:
        """Start with none.

        Args:
          channel: One end of a pair of `SOCK_SEQPACKET`; this object closes it.
          board: Page on which this end writes what it releases.
          peers_board: Page of the other end.
          send_bytes: Most bytes that this end makes.
          receive_bytes: Most bytes of the other end's that it maps.
          peer: Name of the other end, for the log.
        """
        self._channel = channel
        self._outgoing = OutgoingSegments(send_bytes, peers_board)
        incoming = IncomingSegments(receive_bytes, board, fetch=self._read_channel)
        self._incoming = incoming
        self.open = incoming.open
        self._peer = peer
        self._has_warned = False
        self._is_closed = False
        # Guards `_outgoing` and sends on the channel; `_incoming` belongs to the thread
        # that reads. Taken with no other lock of ours held. Nothing waits for the other
        # end under it: sends on the channel do not wait.
        self._lock = threading.Lock()
        self._unsent_detaches: deque[int] = deque()
        # Changed by single atomic operations, in any thread: slots by the address of
        # memory that `reserve` returned, and those of it that died unsent.
        self._reserved: dict[int, Slot] = {}
        self._unused: deque[Where] = deque()

    def place(self, layout: BufferLayout) -> Where | None:
        """Copy the body of a message into shared memory.

        Returns:
          Where it is; None: there is no room, and the socket must take it.
        """
        if self._reserved and (slot := self._slot_around(layout)) is not None:
            return slot.where
        num_bytes = layout.num_bytes
        slot = self._slot(num_bytes)
        if slot is None:
            return None
        # No lock from here on: the slot is this thread's until its frame is sent. If
        # the process dies meanwhile, no frame has named the slot.
        copy_body(layout, slot.memory)
        return slot.where

    def reserve(self, num_bytes: int) -> np.ndarray | None:
        """Return memory, uint8 [num_bytes], from which `place` sends without a copy.

        If no message is sent from it, it is free again once nobody sees it.
        """
        slot = self._slot(num_bytes)
        if slot is None:
            return None
        memory = np.frombuffer(slot.memory, np.uint8, num_bytes)
        # Until it is dead, here and at the receiver, nobody else gets the slot.
        slot.writer = weakref.ref(memory)
        address = memory.ctypes.data
        self._reserved[address] = slot
        release = weakref.finalize(memory, self._release, address, slot.where)
        release.atexit = False
        return memory

    def lend(self, kept: EncodedOnce, layout: BufferLayout) -> Where | None:
        """Lend a body in common memory; the first to do so, anywhere, copies it there.

        Returns:
          Where it is; None: there is no room, and the socket must take it.
        """
        try:
            body = kept_body(kept, layout)  # not under the lock: others may make it
        except OSError as error:
            self._warn(layout.num_bytes, f"the system has none ({error})")
            return None
        slot = self._slot(body.memory.num_bytes, body.memory)
        return None if slot is None else slot.where

    def take_back(self, where: Where) -> None:
        """Free what `place` returned: the message was not sent."""
        # Bounded, as in `_slot`; a slot that is not taken back is lost for this
        # connection, no more.
        if self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self._outgoing.take_back(where)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Drop all segments; arrays in use stay readable. May be called twice.

        Not while a thread is inside of `open`.
        """
        self._is_closed = True
        # Never waits: the garbage collector may call this inside of the lock, whose
        # holder looks at `_is_closed` afterwards.
        if self._lock.acquire(blocking=False):
            try:
                self._close_all()
            finally:
                self._lock.release()

    def drop_after_fork(self) -> None:
        """Close a forked child's descriptors, and release nothing; see `forks`."""
        # No lock is taken: a thread of the parent may have held it.
        self._is_closed = True
        # First: arrays that die in this process must write nothing on the board, which
        # is the parent's as well.
        self._incoming.drop_after_fork()
        self._close_all()

    def _slot_around(self, layout: BufferLayout) -> Slot | None:
        """Return the reserved slot that holds a body, completed; None: there is none.

        One that holds it elsewhere than at its start, in part, is none.
        """
        first, rest = _address(layout.buffers[0]), []
        slot = self._reserved.get(first)
        if slot is None or layout.num_bytes > len(slot.memory):
            return None
        for start, buffer in zip(layout.offsets, layout.buffers, strict=True):
            address = _address(buffer)
            if address != first + start:
                if first <= address < first + len(slot.memory):
                    return None  # it would be written over
                rest.append((start, buffer))
        # A second message from the same memory, if a handler kept it, finds none.
        if self._reserved.pop(first, None) is None:
            return None
        for start, buffer in rest:
            slot.memory[start : start + len(buffer)] = buffer
        return slot

    def _release(self, address: int, where: Where) -> None:
        """Note that reserved memory died; without a lock, as any line may end here."""
        # A message from this memory would keep it alive, and so takes out a later entry
        # at most: that of another use of the slot.
        slot = self._reserved.get(address)
        if slot is not None and slot.uses == where.uses:
            del self._reserved[address]
            self._unused.append(where)

    def _slot(self, num_bytes: int, common: CommonMemory | None = None) -> Slot | None:
        # Bounded, as a `__del__` that sends may be run inside of it, by this thread.
        if not self._lock.acquire(True, _LOCK_TIMEOUT_S):
            return None
        reason = "its bound is reached"
        try:
            slot = None
            while self._unused:
                self._outgoing.take_back(self._unused.popleft())
            if not self._is_closed:
                slot = self._found(num_bytes, common)
        except OSError as error:
            slot, reason = None, f"the system has none ({error})"
        finally:
            # `close` does not wait for the lock: the holder closes in its place.
            if self._is_closed:
                self._close_all()
            self._lock.release()
        if slot is None:
            self._warn(num_bytes, reason)
        return slot

    def _warn(self, num_bytes: int, reason: str) -> None:
        if not self._has_warned and not self._is_closed:
            self._has_warned = True
            _log.warning(
                "No shared memory for %d bytes to %s: %s. Falling back to the socket, "
                "which is slower. (Shown once.) Drop received arrays sooner (`.copy()` "
                "what you keep), or raise `MessageLimits.shared_bytes`.",
                num_bytes,
                self._peer,
                reason,
            )

    def _found(self, num_bytes: int, common: CommonMemory | None) -> Slot | None:
        # With the lock held. First what is free, then what can be dropped, then new.
        outgoing = self._outgoing
        if slot := outgoing.take(num_bytes, common):
            return slot
        self._make_room(num_bytes)
        if slot := outgoing.take(num_bytes, common):  # a place on the board was missing
            return slot
        if not self._is_attached(outgoing.add(num_bytes, common)):
            return None
        return outgoing.take(num_bytes, common)

    def _make_room(self, num_bytes: int) -> None:
        self._unsent_detaches.extend(self._outgoing.drop_idle(num_bytes))
        while self._unsent_detaches:  # before an attach: the peer has the same bound
            text = _DETACH.pack(b"D", self._unsent_detaches[0])
            self._channel.send(text, socket.MSG_DONTWAIT)
            self._unsent_detaches.popleft()

    def _is_attached(self, segment: Segment | None) -> bool:
        """Give a new segment to the other end; return whether there is one."""
        if segment is None:
            return False
        try:
            # Before any frame names it, on a socket of its own, where the receiver
            # looks when it meets an unknown number.
            text = _ATTACH.pack(b"A", segment.number, segment.num_bytes)
            flags = socket.MSG_DONTWAIT
            socket.send_fds(self._channel, [text], [segment.descriptor], flags)
        except OSError:
            self._outgoing.drop(segment)
            raise
        return True

    def _read_channel(self) -> None:
        """Attach and detach the segments that the other end has made and dropped."""
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        while not self._is_closed:
            try:
                received = self._channel.recvmsg(_ATTACH.size + 1, room, flags)
            except OSError:
                return  # no more of it, or the other end is gone
            text, descriptors = received[0], received_descriptors(received[1])
            try:
                if not text:
                    return
                self._take_note(text, descriptors)
            finally:
                # A mapping keeps the memory; the descriptor is not needed any more.
                for descriptor in descriptors:
                    os.close(descriptor)

    def _take_note(self, text: bytes, descriptors: list[int]) -> None:
        match text[:1], len(text), len(descriptors):
            case b"A", _ATTACH.size, 1:
                _, number, num_bytes = _ATTACH.unpack(text)
                self._incoming.attach(number, num_bytes, descriptors[0])
            case b"A", _ATTACH.size, 0:
                raise DecodeError(
                    "Shared memory came without its descriptor. Raise the limit of "
                    "open files (`ulimit -n`), or open fewer connections."
                )
            case b"D", _DETACH.size, 0:
                self._incoming.detach(_DETACH.unpack(text)[1])
            case _:
                raise DecodeError(
                    "The channel of shared memory got an invalid message."
                )

    def _close_all(self) -> None:
        self._outgoing.close()
        self._incoming.close()
        self._channel.close()


def _address(buffer: Buffer) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def received_descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that `recvmsg` put into its second result."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
