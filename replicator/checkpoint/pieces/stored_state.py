"""The leaves in a checkpoint's arrays, read region by region."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from replicator.checkpoint.buckets.retries import (
    LIMIT_S,
    Failure,
    call_again,
    classify,
)
from replicator.checkpoint.manifest import LeafRecord, Manifest
from replicator.checkpoint.pieces.arrays import problem, read_nowait
from replicator.checkpoint.pieces.grid import Box, Shape, whole_box
from replicator.checkpoint.pieces.small_leaves import unpack
from replicator.errors import BucketError, CheckpointError


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
        wait = self._read_nowait(stored.array, box)
        return lambda: wait().view(dtype)

    def _small(self, leaf: int, dtype: np.dtype) -> np.ndarray:
        stored = self._leaves[leaf]
        for name in {piece.array for piece in stored.small} - self._packed.keys():
            whole = whole_box(self._arrays[name].shape)
            self._packed[name] = self._read_nowait(name, whole)()
        return unpack(stored, dtype, self._packed)

    def _read_nowait(self, name: str, box: Box) -> Callable[[], np.ndarray]:
        begin = functools.partial(read_nowait, self._arrays[name], self._kvstore, box)
        first: list[Callable[[], np.ndarray]] = []

        def read() -> np.ndarray:
            return (first.pop() if first else begin())()

        def wait() -> np.ndarray:
            limit_s = 0.0 if self._kvstore["driver"] == "file" else LIMIT_S
            try:
                return call_again(read, again=_passes, limit_s=limit_s)
            except (ValueError, TimeoutError) as failure:
                raise unreadable(self._kvstore, failure) from None

        try:
            first.append(begin())
        except ValueError as failure:
            raise unreadable(self._kvstore, failure) from None
        return wait


def _passes(failure: Failure) -> bool:
    return failure in ("passing", "refused")


def stored_as(leaf: LeafRecord) -> np.dtype:
    """Return the dtype of a leaf's data; random keys are unsigned integers.

    >>> stored_as(LeafRecord(parts=("w",), dtype="float32", shape=()))
    dtype('float32')
    """
    name = "uint32" if leaf.key_impl else leaf.dtype
    return np.dtype(getattr(ml_dtypes, name, name))


def unreadable(kvstore: Mapping[str, Any], failure: Exception) -> CheckpointError:
    """Return the error of a checkpoint that TensorStore cannot read.

    >>> str(unreadable({"path": "a/"}, ValueError("DATA_LOSS: a is damaged")))
    '`a/` must be what was saved, got damage: DATA_LOSS: a is damaged. ...'
    """
    # No damage: whoever took it for one would restore an older step.
    if kvstore.get("bucket") and _passes(classify(failure)):
        return BucketError(
            f"`{kvstore['bucket']}/{kvstore['path']}` must be readable, got "
            f"{problem(failure)}. Look at the network, the service and its rights."
        )
    return CheckpointError(
        f"`{kvstore['path']}` must be what was saved, got damage: "
        f"{problem(failure)}. Restore an earlier step."
    )
