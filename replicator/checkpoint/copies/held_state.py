"""The leaves of a step in the copies of all processes, read region by region."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np

from replicator.checkpoint.manifest import Manifest
from replicator.checkpoint.pieces.grid import Box, Shape
from replicator.checkpoint.pieces.stored_state import stored_as
from replicator.distributed.piece_transfer import PieceTree, read_pieces
from replicator.errors import CheckpointError, RpcError
from replicator.rpc.client.client import Client

_SMALL_BYTES = 1 << 16


@dataclasses.dataclass(kw_only=True, slots=True)
class HeldCopy:
    """A copy of one process's shards, in a keeper.

    Attributes:
      keeper: Client of the keeper.
      name: Name of the copy there.
      tree: Its pieces; each is named by the number of its leaf.
      timeout_s: Longest wait for a piece, in seconds.
      small: Its small pieces, once one of them was wanted.
    """

    keeper: Client
    name: str
    tree: PieceTree
    timeout_s: float
    small: dict[int, np.ndarray] | None = None

    def read(self, number: int) -> np.ndarray:
        """Return a piece; its checksum is verified.

        Raises:
          CheckpointError: It is damaged, or the keeper does not hand it over.
        """
        pieces = self.tree.pieces
        if pieces[number].num_bytes > _SMALL_BYTES:
            return self._read([number])[number]
        if self.small is None:  # all of them at once: they may be thousands
            self.small = self._read(
                other
                for other, piece in enumerate(pieces)
                if piece.num_bytes <= _SMALL_BYTES
            )
        return self.small[number]

    def _read(self, numbers: Iterable[int]) -> dict[int, np.ndarray]:
        try:
            return read_pieces(
                self.keeper, self.name, self.tree, numbers, timeout_s=self.timeout_s
            )
        except RpcError as failure:
            raise CheckpointError(
                f"The copy `{self.name}` must be what was handed over, got: {failure}"
            ) from failure


class HeldState:
    """A `StoredState` in memory.

    Args:
      manifest: Manifest of the step.
      copies: Copies of all processes.
    """

    def __init__(self, manifest: Manifest, copies: Iterable[HeldCopy]) -> None:
        self._manifest = manifest
        self._places: dict[int, list[tuple[HeldCopy, int, Box]]]
        self._places = collections.defaultdict(list)
        for copy in copies:
            for number, piece in enumerate(copy.tree.pieces):
                box = Box(start=piece.start, shape=piece.shape)
                self._places[int(piece.name)].append((copy, number, box))

    def shape(self, leaf: int) -> Shape:
        """Return the shape of a leaf; for random keys that of their data."""
        return self._manifest.stored[leaf].shape

    def dtype(self, leaf: int) -> np.dtype:
        """Return the dtype of a leaf; random keys are unsigned integers."""
        return stored_as(self._manifest.leaves[leaf])

    def chunk(self, leaf: int) -> Shape:
        """Return the shape of the blocks of a leaf that are read as one: any."""
        return (1,) * len(self.shape(leaf))

    def read_nowait(self, leaf: int, box: Box) -> Callable[[], np.ndarray]:
        """Return a function that reads a region.

        It raises CheckpointError if the copies do not hold it, whole.
        """

        def read() -> np.ndarray:
            region, left = np.empty(box.shape, self.dtype(leaf)), math.prod(box.shape)
            for copy, number, place in self._places[leaf]:
                common = box.common(place)
                if 0 in common.shape:
                    continue
                found = copy.read(number)[common.within(place)]
                region[common.within(box)] = found.view(region.dtype)
                left -= found.size
            if left:
                raise CheckpointError(
                    f"Copies must hold all of a state, got none of {left} elements of "
                    f"`{self._manifest.leaves[leaf].path}`."
                )
            return region

        return read
