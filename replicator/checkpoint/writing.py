"""Write what this process holds of a draft, a few shards at a time."""

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeAlias

import numpy as np

from replicator.checkpoint.checksums import FileRecord, record_bytes
from replicator.checkpoint.pieces.arrays import encode_shard, shard_name
from replicator.checkpoint.pieces.grid import Box, cells, whole_box
from replicator.checkpoint.pieces.held import fetch
from replicator.checkpoint.pieces.plan import StoredArray, small_array
from replicator.checkpoint.pieces.small_leaves import pack
from replicator.checkpoint.snapshot import Block, Draft

Put: TypeAlias = Callable[[str, bytes], None]
"""`put(name, content)`: writes a file below a checkpoint, durably."""

_AT_ONCE = 2


class ShardWriter:
    """Threads that encode and write shards, a few at a time.

    They live as long as the store: memory that new threads leave behind would grow from
    save to save.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def write(self, draft: Draft, state: str, put: Put) -> list[FileRecord]:
        """Write the shards of this process; return their records.

        Each block is taken out of the draft when it is written. At most `_AT_ONCE`
        shards are on the host, and in their encoded form, at a time.

        Args:
          draft: Draft of this process.
          state: Folder of the arrays in the checkpoint.
          put: Writes a file; called on several threads.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "replicator-shards")
        records: list[FileRecord] = []
        running: collections.deque[Future[FileRecord]] = collections.deque()
        try:
            for array, name, block, box in _shards(draft):
                if len(running) == _AT_ONCE:
                    records.append(running.popleft().result())
                task = (_write, array, f"{state}/{name}", block, box, put)
                running.append(self._pool.submit(*task))
                del block, task  # its memory is free as soon as it is written
            return records + [each.result() for each in running]
        finally:
            wait(running)  # nothing is written behind a failure

    def close(self) -> None:
        """End the threads; another `write` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _shards(draft: Draft) -> Iterator[tuple[StoredArray, str, Block, Box]]:
    """Yield each shard as its array, name, the block that it is in, and its region."""
    arrays = {array.name: array for array in draft.plan.arrays}
    while draft.blocks or draft.small:
        if draft.blocks:
            block = draft.blocks.popleft()
            array = arrays[str(block.leaf)]
        else:
            array = arrays[small_array(draft.process)]
            packed = pack([np.asarray(each.array) for each in draft.small])
            draft.small.clear()
            block = Block(leaf=-1, box=whole_box(array.shape), array=packed)
        for index, box in cells(block.box, array.shard):
            yield array, f"{array.name}/{shard_name(index)}", block, box


def _write(
    array: StoredArray, name: str, block: Block, box: Box, put: Put
) -> FileRecord:
    values = fetch(block.array, box.within(block.box))
    content = encode_shard(array, values, name)
    put(name, content)
    return record_bytes(name, content)
