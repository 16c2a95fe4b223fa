"""The leaves in a checkpoint's arrays, read region by region."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from replicator.checkpoint.manifest import LeafRecord, Manifest
from replicator.checkpoint.pieces.arrays import problem, read_nowait
from replicator.checkpoint.pieces.grid import Box, Shape, whole_box
from replicator.checkpoint.pieces.small_leaves import unpack
from replicator.errors import CheckpointError


class StoredState(Protocol):
    """Leaves that can be read by regions, in the order of the manifest."""

    def shape(self, leaf: int) -> Shape:
        """Return the stored shape of a leaf; for random keys that of their data."""
        ...

    def dtype(self, leaf: int) -> np.dtype:
        """Return the dtype of a leaf; random keys are unsigned integers."""
        ...

    def chunk(self, leaf: int) -> Shape:
        """Return the shape of the blocks of a leaf that are read as one."""
        ...

    def read_nowait(self, leaf: int, box: Box) -> Callable[[], np.ndarray]:
        """Begin to read a region; return a function that waits for it.

        It raises CheckpointError if the region cannot be read.
        """
        ...


class ShardedState:
    """Leaves in arrays of zarr 3, as this version writes them.

    Args:
      manifest: Manifest of the checkpoint.
      kvstore: Folder of the arrays, as a specification of TensorStore.
    """

    def __init__(self, manifest: Manifest, kvstore: Mapping[str, Any]):
        self._records = manifest.leaves
        self._leaves = manifest.stored
        self._arrays = {array.name: array for array in manifest.arrays}
        self._kvstore = kvstore
        self._packed: dict[str, np.ndarray] = {}  # of small leaves, each read once

    def shape(self, leaf: int) -> Shape:
        """Return the stored shape of a leaf; for random keys that of their data."""
        return self._leaves[leaf].shape

    def dtype(self, leaf: int) -> np.dtype:
        """Return the dtype of a leaf; random keys are unsigned integers."""
        return stored_as(self._records[leaf])

    def chunk(self, leaf: int) -> Shape:
        """Return the shape of the blocks of a leaf that are read as one."""
        name = self._leaves[leaf].array
        return self._leaves[leaf].shape if name is None else self._arrays[name].chunk

    def read_nowait(self, leaf: int, box: Box) -> Callable[[], np.ndarray]:
        """Begin to read a region; return a function that waits for it.

        It raises CheckpointError if the region cannot be read.
        """
        stored, dtype = self._leaves[leaf], self.dtype(leaf)
        if stored.array is None:
            return lambda: self._small(leaf, dtype)[box.within(whole_box(stored.shape))]
        array = self._arrays[stored.array]
        try:
            wait = read_nowait(array, self._kvstore, box)
        except ValueError as failure:
            raise unreadable(self._kvstore, failure) from None
        return lambda: _checked(wait, self._kvstore).view(dtype)

    def _small(self, leaf: int, dtype: np.dtype) -> np.ndarray:
        stored = self._leaves[leaf]
        for name in {piece.array for piece in stored.small} - self._packed.keys():
            array = self._arrays[name]
            wait = read_nowait(array, self._kvstore, whole_box(array.shape))
            self._packed[name] = _checked(wait, self._kvstore)
        return unpack(stored, dtype, self._packed)


def stored_as(leaf: LeafRecord) -> np.dtype:
    """Return the dtype of a leaf's data; random keys are unsigned integers.

    >>> stored_as(LeafRecord(parts=("w",), dtype="float32", shape=()))
    dtype('float32')
    """
    name = "uint32" if leaf.key_impl else leaf.dtype
    return np.dtype(getattr(ml_dtypes, name, name))


def unreadable(kvstore: Mapping[str, Any], failure: ValueError) -> CheckpointError:
    """Return the error of a checkpoint that TensorStore cannot read.

    >>> str(unreadable({"path": "a/"}, ValueError("DATA_LOSS: a is damaged")))
    '`a/` must be what was saved, got damage: DATA_LOSS: a is damaged. ...'
    """
    return CheckpointError(
        f"`{kvstore['path']}` must be what was saved, got damage: "
        f"{problem(failure)}. Restore an earlier step."
    )


def _checked(wait: Callable[[], np.ndarray], kvstore: Mapping[str, Any]) -> np.ndarray:
    try:
        return wait()
    except ValueError as failure:
        raise unreadable(kvstore, failure) from None
