"""The sender's side of shared memory: segments, cut into slots, and lent.

No sockets and no locks here; `shared_memory.py` holds the protocol, and the lock.
"""

import array
import dataclasses
import functools
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np

from replicator.rpc.transports.frames import Where
from replicator.rpc.transports.same_host.sealed_memory import make_sealed

_NO_BOARD = memoryview(b"").cast("I")
_NO_MEMORY = memoryview(b"")
_COMMON_SLOTS = 0  # the size class of slots of common memory, which all are alike
_FEW_LENT = 16
_SEGMENT_BYTES = 16 << 20  # several slots share a segment, as far as they fit into this
_ref = weakref.ref
_nobody = type(None)


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """Memory of this process: cut into slots of one size, or common, and lent whole.

    Attributes:
      number: Name for the receiver; never used again.
      descriptor: Descriptor of the memory file.
      num_bytes: Size in bytes.
      memory: All of it, to write to; none if it is common.
      slot_bytes: Size of a slot; `_COMMON_SLOTS` if it is common.
      made: Number of slots that have memory so far.
      lent: Number of messages in it that the receiver has not released.
      common: Reference to common memory, as long as anything may be sent in it.
    """

    number: int
    descriptor: int
    num_bytes: int
    memory: memoryview
    slot_bytes: int
    made: int = 0
    lent: int = 0
    common: "weakref.ref[CommonMemory] | None" = None

    @classmethod
    def make(cls, number: int, *, slot_bytes: int, num_slots: int) -> "Segment":
        """Make a sealed one; its memory is taken slot by slot.

        Raises:
          OSError: The system has no memory, or no descriptor, for it.
        """
        size = slot_bytes * num_slots
        descriptor, mapped = make_sealed(size)
        # The descriptor is kept to be sent, and for `make_slot`.
        return cls(number, descriptor, size, memoryview(mapped), slot_bytes)

    def make_slot(self) -> int | None:
        """Take memory for one more slot; return its offset. None: it is all taken.

        Raises:
          OSError: The system has none. (Without asking, writing would kill us.)
        """
        offset = self.made * self.slot_bytes
        if offset >= len(self.memory):
            return None
        os.posix_fallocate(self.descriptor, offset, self.slot_bytes)
        self.made += 1
        return offset

    def is_over(self) -> bool:
        """Return whether it is common memory in which nothing will be sent again."""
        return self.common is not None and self.common() is None

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last user."""
        if self.common is None:  # else it is not this connection's
            os.close(self.descriptor)


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """Room for the body of one message.

    Attributes:
      segment: Segment that holds it.
      offset: Offset in the segment.
      memory: Bytes, to write to.
      number: Place on the receiver's board.
      uses: Number of uses of that place, modulo 2^32.
      writer: Returns the array by which it is still seen in this process, if any.
    """

    segment: Segment
    offset: int
    memory: memoryview
    number: int
    uses: int
    writer: Callable[[], object] = _nobody

    def is_released(self, board: memoryview) -> bool:
        """Return whether neither the receiver nor anyone here sees it."""
        return board[self.number] == self.uses and self.writer() is None

    @property
    def where(self) -> Where:
        """Return its place, as in a frame."""
        place = (self.segment.number, self.offset, self.number, self.uses)
        return tuple.__new__(Where, place)


class OutgoingSegments:
    """The slots of one sender, within a bound."""

    def __init__(self, max_bytes: int, board: mmap.mmap) -> None:
        """Start with none.

        Args:
          max_bytes: Most bytes of all segments together.
          board: Page on which the receiver writes which use of a slot it has released.
        """
        self._max_bytes = max_bytes
        # Mapped here to read only. The receiver writes to it at any time.
        self._board = memoryview(board).cast("I")
        self._board_array = np.frombuffer(board, np.uint32)
        self._segments: dict[int, Segment] = {}
        self._next_number = 0
        # By size: those that are free, and the one that was lent last, if any.
        self._free: dict[int, list[Slot]] = {}
        self._last: dict[int, Slot] = {}
        self._lent: dict[int, Slot] = {}
        # By number, and no longer than that: most connections use few of thousands.
        self._is_lent = bytearray()
        self._uses = array.array("I")
        self._free_numbers: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Return the size of all segments."""
        return sum(segment.num_bytes for segment in self._segments.values())

    def take(self, num_bytes: int, common: "CommonMemory | None" = None) -> Slot | None:
        """Return a free slot; the last one if it is, as it may be in a cache.

        Args:
          num_bytes: Number of bytes of the body.
          common: Common memory that holds the body already; it is lent once more.

        Returns:
          The slot; None: no segment has one or room for one more, or the receiver has
          not been given the common memory.

        Raises:
          OSError: The system has no memory.
        """
        if common is not None:
            return self._take_common(common)
        # The lock of `SharedMemory` is held in all of this class but `has_released`.
        size = size_class(num_bytes)
        last = self._last.get(size)
        # Equal: the receiver has released this very use, and looks at it no more.
        if last is not None and last.is_released(self._board):
            return self._lend(last, size)
        free = self._free.setdefault(size, [])
        if not free:
            self._find_released()
        slot = free.pop() if free else self._new_slot(size)
        return None if slot is None else self._lend(slot, size)

    def take_back(self, where: Where) -> None:
        """Free a slot whose message was not sent, unless it is still seen here."""
        slot = self._lent.get(where.slot)
        if slot is not None and slot.uses == where.uses and slot.writer() is None:
            self._set_free(slot)

    def drop_idle(self, num_bytes: int) -> list[int]:
        """Drop common ones that are over, and free ones until a new one fits.

        Returns:
          Their numbers.
        """
        self._find_released()
        dropped = []
        for number, segment in list(self._segments.items()):
            # All is released, so the receiver has no loan of it, and can detach it.
            if segment.lent:
                continue
            has_room = self._fits(num_bytes) and self._has_number()
            if segment.is_over() or not has_room:
                self.drop(segment)
                dropped.append(number)
        return dropped

    def add(
        self, num_bytes: int, common: "CommonMemory | None" = None
    ) -> Segment | None:
        """Make a segment of slots for `num_bytes`, or of common memory.

        Returns:
          The segment; None: it is past the bound, or is there already.

        Raises:
          OSError: The system has no memory.
        """
        if not self._fits(num_bytes) or not self._has_number():
            return None
        number = self._next_number
        if common is None:
            size = size_class(num_bytes)
            slots = min(_SEGMENT_BYTES, self._max_bytes - self.num_bytes) // size
            segment = Segment.make(number, slot_bytes=size, num_slots=max(1, slots))
        elif self in common.segments:
            return None
        else:
            segment = Segment(
                number=number,
                descriptor=common.descriptor,
                num_bytes=common.num_bytes,
                memory=_NO_MEMORY,
                slot_bytes=_COMMON_SLOTS,
                common=_ref(common),
            )
            common.segments[self] = segment
        self._next_number += 1
        self._segments[number] = segment
        return segment

    def has_released(self, segment: Segment) -> bool:
        """Return whether the receiver sees nothing of common memory; for any thread.

        None of it is being lent meanwhile. The receiver writes on the board for slots
        that are lent; one that was taken out of the list had been released.
        """
        board = self._board
        lent = [slot for slot in [*self._lent.values()] if slot.segment is segment]
        return not lent or (
            bool(board) and all(board[slot.number] == slot.uses for slot in lent)
        )

    def drop(self, segment: Segment) -> None:
        """Give up a segment none of whose slots is lent."""
        del self._segments[segment.number]
        if segment.common is not None and (common := segment.common()) is not None:
            del common.segments[self]
        free = self._free.get(segment.slot_bytes, [])
        gone = [slot for slot in free if slot.segment is segment]
        free[:] = [slot for slot in free if slot.segment is not segment]
        self._free_numbers += [slot.number for slot in gone]
        segment.close()

    def close(self) -> None:
        """Give all descriptors back."""
        for segment in self._segments.values():
            common = None if segment.common is None else segment.common()
            if common is not None:
                # Its release will not be seen any more. In this order: `is_free` in
                # another thread reads these the other way round.
                if not self.has_released(segment):
                    common.is_spoilt = True
                common.segments.pop(self, None)
            segment.close()
        # Arrays of the receiver stay mapped: it alone decides when they die.
        for table in (self._segments, self._free, self._last, self._lent):
            table.clear()
        self._board, self._board_array = _NO_BOARD, np.frombuffer(_NO_BOARD, np.uint32)

    def _fits(self, num_bytes: int) -> bool:
        return self.num_bytes + size_class(num_bytes) <= self._max_bytes

    def _take_common(self, common: "CommonMemory") -> Slot | None:
        segment = common.segments.get(self)
        if segment is None:
            return None
        # Each loan has a place on the board of its own: receivers release one by one.
        if not self._free_numbers:
            self._find_released()
        if not self._has_number():
            return None
        slot = Slot(segment, 0, _NO_MEMORY, *self._number())
        return self._lend(slot, _COMMON_SLOTS)

    def _new_slot(self, size: int) -> Slot | None:
        for segment in self._segments.values():
            if segment.slot_bytes == size and self._has_number():
                offset = segment.make_slot()
                if offset is not None:
                    memory = segment.memory[offset : offset + size]
                    return Slot(segment, offset, memory, *self._number())
        return None

    def _has_number(self) -> bool:
        return bool(self._free_numbers) or len(self._uses) < len(self._board)

    def _number(self) -> tuple[int, int]:
        """Return a place on the board that no slot has, and its uses so far."""
        if self._free_numbers:
            number = self._free_numbers.pop()
            return number, self._uses[number]
        self._is_lent.append(False)
        self._uses.append(0)
        return len(self._uses) - 1, 0

    def _lend(self, slot: Slot, size: int) -> Slot:
        number = slot.number
        # A new use: what the receiver wrote for the last one no longer counts.
        slot.uses = self._uses[number] = (slot.uses + 1) & 0xFFFFFFFF
        if number not in self._lent:
            slot.segment.lent += 1
            self._lent[number] = slot
            self._is_lent[number] = True
        self._last[size] = slot
        return slot

    def _find_released(self) -> None:
        if len(self._lent) <= _FEW_LENT:
            for slot in [*self._lent.values()]:
                if slot.is_released(self._board):
                    self._set_free(slot)
            return
        # For thousands of kept slots a loop would take longer than the copy.
        uses = np.frombuffer(self._uses, np.uint32)
        is_released = self._board_array[: len(uses)] == uses
        is_released &= np.frombuffer(self._is_lent, np.bool_)
        for number in np.flatnonzero(is_released).tolist():
            if (slot := self._lent[number]).writer() is None:
                self._set_free(slot)

    def _set_free(self, slot: Slot) -> None:
        size = slot.segment.slot_bytes
        del self._lent[slot.number]
        self._is_lent[slot.number] = False
        slot.segment.lent -= 1
        if slot.segment.common is None:
            self._free.setdefault(size, []).append(slot)
        else:
            self._free_numbers.append(slot.number)
        if self._last.get(size) is slot:
            del self._last[size]


@functools.lru_cache(maxsize=1024)  # programs send the same sizes over and over
def size_class(num_bytes: int) -> int:
    """Round up so that slots fit messages of about the same size.

    To a power of two up to 1 MiB; then by 25% at most.

    >>> size_class(40_000), size_class(9 << 20)
    (65536, 10485760)
    """
    bits = max(num_bytes - 1, 1).bit_length()
    step = 1 << (bits if bits <= 20 else bits - 3)
    return -(-num_bytes // step) * step


class CommonMemory:
    """Memory in which connections lend one body to any number of receivers.

    Attributes:
      descriptor: Descriptor of the memory file; closed when this object dies. The
        memory is freed with the last process that has mapped it, however that ends.
      num_bytes: Size in bytes.
      memory: Bytes, to write to.
      process: Process that made it; a forked one may not write to it.
      segments: Its segment in each connection whose receiver has been given it.
      is_spoilt: Whether a connection ended whose receiver may still see it.
    """

    def __init__(self, num_bytes: int) -> None:
        """Make it, with all its pages.

        Raises:
          OSError: The system has no memory, or no descriptor, for it; or it cannot keep
            receivers from writing to it.
        """
        self.descriptor, mapped = make_sealed(num_bytes, is_common=True)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        # Without asking, writing would kill us where memory is short.
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.num_bytes = num_bytes
        self.memory = memoryview(mapped)
        self.process = os.getpid()
        # A connection enters itself under its own lock, and leaves when it closes;
        # `is_free` reads a copy, without a lock.
        self.segments: dict[OutgoingSegments, Segment] = {}
        self.is_spoilt = False

    def is_free(self) -> bool:
        """Return whether no receiver sees any of it; for any thread.

        None of it is being lent meanwhile: the body that it held is dead.
        """
        lenders = [*self.segments.items()]
        is_released = all(lender.has_released(segment) for lender, segment in lenders)
        return is_released and not self.is_spoilt and self.process == os.getpid()
