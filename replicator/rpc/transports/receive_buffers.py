"""Keep warm memory for large bodies, so that none is mapped and zeroed per message.

A buffer is lent again only when nobody can see it any more. Arrays that are decoded
from it, and views of them, each keep the buffer alive (through a `memoryview`, whose
exporter it is); so when the pool's own reference is the only one left, all of them are
gone, and nobody can make a new one. Past its bound the pool lends memory that it does
not keep: it costs a little time, and is freed with its last view.
"""

import functools
import sys
import threading

import numpy as np

POOL_BYTES = 256 << 20
_ALIGNMENT = 64  # of a cache line; and jax takes such memory without a copy
_MIN_BYTES = 1 << 16
_MAX_KEPT = 64  # they are looked through for an idle one
# The entry of the pool's list, the loop variable, and `getrefcount`'s argument.
_REFERENCES_WHEN_IDLE = 3


class ReceiveBuffers:
    """Memory for what is received; for any number of connections and threads."""

    def __init__(self, *, max_bytes: int = POOL_BYTES) -> None:
        """Start empty.

        Args:
          max_bytes: What it keeps at most, lent or not.
        """
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: list[np.ndarray] = []
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Return how much memory the pool holds."""
        return self._kept_bytes

    def lend(self, num_bytes: int) -> memoryview:
        """Return writable, aligned memory that nobody else sees.

        Args:
          num_bytes: Its length.
        """
        size = size_class(num_bytes)
        if num_bytes < _MIN_BYTES or size > self._max_bytes:
            return _aligned(num_bytes).data
        with self._lock:
            array = self._take_idle(size)
            if array is None:
                array = _aligned(size)
                if self._make_room(size):
                    self._kept.append(array)
                    self._kept_bytes += size
            return array.data[:num_bytes]

    def _take_idle(self, size: int) -> np.ndarray | None:
        for array in reversed(self._kept):
            if array.size == size and sys.getrefcount(array) == _REFERENCES_WHEN_IDLE:
                return array
        return None

    def _make_room(self, size: int) -> bool:
        """Forget idle buffers, the oldest first, until `size` more fit."""
        number = 0
        while number < len(self._kept) and not self._has_room(size):
            array = self._kept[number]
            if sys.getrefcount(array) == _REFERENCES_WHEN_IDLE:
                del self._kept[number]
                self._kept_bytes -= array.size
            else:
                number += 1
        return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        fits = self._kept_bytes + size <= self._max_bytes
        return fits and len(self._kept) < _MAX_KEPT


@functools.lru_cache(maxsize=1024)  # programs send the same sizes over and over
def size_class(num_bytes: int) -> int:
    """Round up so that buffers fit messages of about the same size.

    To a power of two up to 1 MiB; then by 25% at most.
    """
    bits = max(num_bytes - 1, 1).bit_length()
    step = 1 << (bits if bits <= 20 else bits - 3)
    return -(-num_bytes // step) * step


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]
