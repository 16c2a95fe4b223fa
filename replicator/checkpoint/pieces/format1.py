"""The leaves in a checkpoint of format 1: orbax's files, read by TensorStore alone.

They are arrays of zarr 2 in one store `ocdbt`, named by the parts of paths joined by
dots. Empty arrays are not there; `uint2` and `uint4` are bytes. They have no checksums
of their own: the manifest has one of each file.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from replicator.checkpoint.manifest import Manifest
from replicator.checkpoint.pieces.grid import Box, Shape, whole_box
from replicator.checkpoint.pieces.stored_state import stored_as, unreadable


class OrbaxState:
    """Leaves in orbax's files.

    Args:
      manifest: Manifest of the checkpoint, whose files were verified.
      kvstore: Folder of the files, as a specification of TensorStore.
    """

    def __init__(self, manifest: Manifest, kvstore: Mapping[str, Any]):
        import tensorstore

        self._tensorstore = tensorstore
        self._kvstore = kvstore
        self._records = manifest.leaves
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._opened: dict[int, Any] = {}

    def shape(self, leaf: int) -> Shape:
        """Return the stored shape of a leaf; for random keys that of their data."""
        record = self._records[leaf]
        return record.shape if 0 in record.shape else tuple(self._open(leaf).shape)

    def dtype(self, leaf: int) -> np.dtype:
        """Return the dtype of a leaf; random keys are unsigned integers."""
        return stored_as(self._records[leaf])

    def chunk(self, leaf: int) -> Shape:
        """Return the shape of the blocks of a leaf that are read as one."""
        shape = self.shape(leaf)
        if 0 in shape or not shape:
            return shape
        return tuple(self._open(leaf).chunk_layout.read_chunk.shape)

    def read_nowait(self, leaf: int, box: Box) -> Callable[[], np.ndarray]:
        """Begin to read a region; return a function that waits for it.

        It raises CheckpointError if the region cannot be read.
        """
        dtype = self.dtype(leaf)
        if 0 in box.shape:
            return lambda: np.empty(box.shape, dtype)
        whole = whole_box(self.shape(leaf))
        read = self._open(leaf)[box.within(whole)].read()

        def wait() -> np.ndarray:
            try:
                array = read.result()
            except ValueError as failure:
                raise unreadable(self._kvstore, failure) from None
            return array if array.dtype == dtype else array.view(dtype)

        return wait

    def _open(self, leaf: int) -> Any:
        if leaf not in self._opened:
            store = {"driver": "ocdbt", "base": dict(self._kvstore)}
            name = ".".join(self._records[leaf].parts)
            spec = {"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}
            opening = self._tensorstore.open(spec, open=True, context=self._context)
            try:
                self._opened[leaf] = opening.result()
            except ValueError as failure:
                raise unreadable(self._kvstore, failure) from None
        return self._opened[leaf]
