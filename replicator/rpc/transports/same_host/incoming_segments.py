"""The receiver's side of shared memory: mapped segments, and their parts in use.

No sockets and no locks here; `shared_memory.py` holds the protocol.
"""

import functools
import mmap
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from replicator.errors import DecodeError
from replicator.rpc.transports.frames import Where
from replicator.rpc.transports.same_host.sealed_memory import map_sealed

_NO_BOARD = memoryview(b"").cast("I")
_frombuffer = np.frombuffer
_uint8 = np.uint8
_partial = functools.partial
_ref = weakref.ref


class IncomingSegments:
    """Memory of the other end, mapped to read, within a bound."""

    def __init__(
        self, max_bytes: int, board: mmap.mmap, *, fetch: Callable[[], None]
    ) -> None:
        """Start with none.

        Args:
          max_bytes: Most bytes of all segments together.
          board: Page on which this end writes which use of a slot it has released. No
            other process writes to it.
          fetch: Attaches the segments that the other end has made, if one is unknown.
        """
        self._max_bytes = max_bytes
        self._board = memoryview(board).cast("I")
        self._fetch = fetch
        # Of the thread that receives; `_release` touches the loans of a segment only.
        self._segments: dict[int, _Mapped] = {}

    def attach(self, number: int, size: int, descriptor: int) -> None:
        """Map a segment; the descriptor stays the caller's.

        Raises:
          DecodeError: It does not match its description, or exceeds the bound, or the
            system cannot map it.
        """
        mapped = sum(len(segment.memory) for segment in self._segments.values())
        if number in self._segments or not 0 < size <= self._max_bytes - mapped:
            raise DecodeError(
                f"Shared memory must be at most {self._max_bytes} bytes in all, got "
                f"{size} more to {mapped}. Use the same `MessageLimits` at both ends."
            )
        # To read only, and of a size that the kernel confirms.
        try:
            self._segments[number] = _Mapped(map_sealed(descriptor, size), {})
        except OSError as error:
            raise DecodeError(f"Shared memory cannot be mapped: {error}.") from error

    def detach(self, number: int) -> None:
        """Forget a segment.

        Raises:
          DecodeError: The number is unknown, or the segment is in use.
        """
        # Memory with arrays in use stays mapped by them, whatever the sender does.
        segment = self._segments.pop(number, None)
        if segment is None or segment.loans:
            raise DecodeError(
                f"Shared memory {number} was taken away that is in use, or never came."
            )

    def open(self, where: Where, num_bytes: int) -> np.ndarray:
        """Return read-only bytes of a segment; their death releases the slot.

        Only the thread that receives may call this.

        Raises:
          DecodeError: They are not within a segment, or still in use; or the other end
            broke the protocol otherwise.
        """
        number, offset, slot, uses = where
        # Only then: an attach was sent before the first frame that names the segment.
        segment = self._segments.get(number)
        if segment is None:
            self._fetch()
            segment = self._segments.get(number)
        if segment is None:
            raise DecodeError(f"Shared memory {number} was named, but never came.")
        memory, loans = segment
        # Checked by subtraction: both numbers are the other end's.
        if offset % mmap.PAGESIZE or num_bytes > len(memory) - offset:
            raise DecodeError(
                f"A message must lie within its shared memory of {len(memory)} bytes, "
                f"got {num_bytes} at {offset}."
            )
        board = self._board
        # A sender that reuses a slot too early could change arrays under their users.
        if slot in loans or slot >= len(board):
            raise DecodeError("Shared memory was sent again that is still in use.")
        owner = _frombuffer(memory, _uint8, num_bytes, offset)
        # Bound to what it needs, as it may run when the interpreter is ending.
        loans[slot] = _ref(owner, _partial(_release, loans, board, slot, uses))
        return owner

    def drop_after_fork(self) -> None:
        """Release nothing from a forked child: its parent may still use the arrays."""
        for segment in self._segments.values():
            segment.loans.clear()  # and with the weak references what they call

    def close(self) -> None:
        """Forget all; arrays that are in use stay mapped."""
        self._segments.clear()
        self._board = _NO_BOARD
        # The bound method refers to this object: the two would wait for the collector
        # of cycles, which counts two objects and not the memory behind them.
        self._fetch = _fetch_nothing


def _fetch_nothing() -> None:
    """Attach nothing: the connection is closed."""


class _Mapped(NamedTuple):
    """A segment of the other end, and the owners of its slots in use."""

    memory: mmap.mmap
    loans: dict[int, weakref.ref[np.ndarray]]


def _release(
    loans: dict[int, weakref.ref[np.ndarray]],
    board: memoryview,
    slot: int,
    uses: int,
    _: weakref.ref[np.ndarray],
) -> None:
    """Release a slot; called in any thread, where its last view died.

    That may be inside of any other line: no lock may be taken.
    """
    loans.pop(slot, None)  # first: the sender may use the slot again at once
    # If the process dies before this, the slot is lent until the connection ends.
    board[slot] = uses
