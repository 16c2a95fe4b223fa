"""Put small leaves one behind another into bytes, and take them out again."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from replicator.checkpoint.pieces.grid import Box, whole_box
from replicator.checkpoint.pieces.plan import StoredLeaf


def pack(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes of arrays, one behind another.

    >>> pack([np.ones(2, np.int8), np.array(258, np.int16)])
    array([1, 1, 2, 1], dtype=uint8)
    """
    return np.frombuffer(b"".join(piece.tobytes() for piece in pieces), np.uint8)


def unpack(
    leaf: StoredLeaf, dtype: np.dtype, arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return a small leaf.

    Args:
      leaf: Place of its bytes.
      dtype: Its dtype.
      arrays: By name, the arrays of bytes.
    """
    whole = np.empty(leaf.shape, dtype)
    origin = whole_box(leaf.shape)
    for piece in leaf.small:
        size = math.prod(piece.shape)
        flat = np.frombuffer(arrays[piece.array], dtype, size, piece.offset)
        box = Box(start=piece.start, shape=piece.shape)
        whole[box.within(origin)] = flat.reshape(piece.shape)
    return whole
