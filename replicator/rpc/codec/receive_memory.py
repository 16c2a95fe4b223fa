"""Memory for large bodies: new, or that of a body which nobody sees any more.

Whether anybody sees it is not guessed: each body is lent through an object of its own,
which all arrays and views of it keep alive (they are made from its buffer), and whose
death hands the memory back. Counts of references are not asked: 3.14 counts otherwise.
"""

import weakref

import numpy as np

_ALIGNMENT = 64  # of a cache line; and jax takes such memory without a copy
_WARM_FROM_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
# The last one that was handed back: pages that are there cost a third of new ones.
# For all threads, without a lock: the thread that pops it is its only owner.
_warm: list[np.ndarray] = []


def receive_memory(num_bytes: int) -> memoryview:
    """Return writable, aligned memory that no other code sees.

    Args:
      num_bytes: Number of bytes.

    >>> memory = receive_memory(100)
    >>> len(memory), memory.readonly
    (100, False)
    """
    is_kept = _WARM_FROM_BYTES <= num_bytes <= _MOST_BYTES
    memory = _warm_memory(num_bytes) if is_kept else None
    if memory is None:
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    lent = memory[start : start + num_bytes]
    if is_kept:
        # Not at exit, when it would run for memory that is still in use.
        weakref.finalize(lent, _hand_back, memory).atexit = False
    return lent.data


def _warm_memory(num_bytes: int) -> np.ndarray | None:
    try:
        memory = _warm.pop()  # atomic: two threads never get the same
    except IndexError:
        return None
    spare_bytes = len(memory) - _ALIGNMENT - num_bytes
    return memory if 0 <= spare_bytes <= num_bytes // 4 else None


def _hand_back(memory: np.ndarray) -> None:
    """Keep memory whose last view died; called wherever that happens, without locks."""
    _warm[:] = [memory]
