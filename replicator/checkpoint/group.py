"""Save and restore in several processes together: the first one writes for all.

Leaves that are equal everywhere are written by process 0, the chief. If a leaf is
sharded over processes, the others write their pieces beside the checkpoint, and the
chief joins them, so that a checkpoint is the same for any number of processes and any
sharding. So all processes must see the directory. An error of the chief is raised in
all of them: they go on together, or end together.
"""

import dataclasses
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replicator.checkpoint.disk import Disk
from replicator.checkpoint.snapshot import Draft
from replicator.distributed.agreement import Json, exchange
from replicator.distributed.coordination import process_count, process_index
from replicator.errors import (
    BucketError,
    CheckpointError,
    CheckpointInUseError,
    CheckpointMismatchError,
    ReplicatorError,
)

_KNOWN = (BucketError, CheckpointInUseError, CheckpointMismatchError)
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A piece of one leaf that another process has written.

    Attributes:
      leaf: Index of the leaf in the draft.
      start: Start of the piece on each axis of the leaf.
      shape: Shape of the piece.
      path: File that holds it.
      offset: Bytes before it in the file.
      crc32: Checksum of the piece.
    """

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    crc32: int


class Group:
    """The processes that save to one directory; all open their stores in one order.

    Args:
      together: Whether there are other processes; by default, if the program has any.
      timeout_s: Longest wait for one of them, in seconds.
    """

    def __init__(self, *, together: bool | None, timeout_s: float) -> None:
        self.together = process_count() > 1 if together is None else together
        self.is_chief = not self.together or process_index() == 0
        self._timeout_s = timeout_s
        self._name = f"checkpoint-{next(_numbers)}" if self.together else ""

    def share(self, what: str, value: Any) -> list[Any]:
        """Return the values of all processes; a process that is alone gets its own.

        >>> Group(together=False, timeout_s=1.0).share("busy", True)
        [True]
        """
        if not self.together:
            return [value]
        return exchange(f"{self._name}/{what}", value, timeout_s=self._timeout_s)

    def lead(self, what: str, action: Callable[[], Json]) -> Any:
        """Call `action` in the chief; return its result in all processes.

        >>> Group(together=False, timeout_s=1.0).lead("count", lambda: 3)
        3

        Raises:
          CheckpointError: The chief failed; in the chief itself, its own error.
        """
        return self.gather(what, action if self.is_chief else _nothing)[0]

    def gather(self, what: str, action: Callable[[], Json]) -> list[Any]:
        """Call `action` in each process; return all results in all processes.

        >>> Group(together=False, timeout_s=1.0).gather("count", lambda: 3)
        [3]

        Raises:
          CheckpointError: One failed; in that process itself, its own error.
        """
        failure, value = None, None
        try:
            value = action()
        except Exception as error:  # sent to the others, then raised
            failure = error
        replies = self.share(what, {"value": value, "failure": _as_json(failure)})
        if failure is not None:
            raise failure
        for reply in replies:
            if reply["failure"] is not None:
                raise _from_json(*reply["failure"])
        return [reply["value"] for reply in replies]

    def require_all(self, what: str, failure: Exception | None) -> None:
        """Raise in all processes if one of them failed.

        >>> Group(together=False, timeout_s=1.0).require_all("restored", None)

        Raises:
          CheckpointError: One failed; in that process itself, `failure`.
        """
        replies = self.share(what, _as_json(failure))
        if failure is not None:
            raise failure
        for process, reply in enumerate(replies):
            if reply is not None:
                kind, text = reply
                raise _from_json(kind, f"Process {process}: {text}")


def share_pieces(
    draft: Draft, directory: Path, *, group: Group, disk: Disk
) -> tuple[Piece, ...]:
    """Let all others write their pieces of a draft; return these in the chief.

    Args:
      draft: Draft of this process.
      directory: Directory of all checkpoints.
      group: The processes.
      disk: The file system.

    Raises:
      CheckpointError: A process could not write its pieces.
    """
    if not (group.together and draft.spread):
        return ()

    def begin() -> str:
        # A name that the next owner removes as a leftover, if the chief dies.
        name = f".writing-pieces-{draft.step}-{os.urandom(4).hex()}"
        disk.make_directory(directory / name)
        return name

    # On the saver's thread of each process. Each exchange is a barrier: the folder is
    # there before pieces are written, all pieces before the chief reads one.
    folder = directory / group.lead("pieces", begin)

    def write() -> list[tuple]:
        try:
            return [] if group.is_chief else _write_pieces(draft, folder, disk)
        except Exception as failure:
            raise CheckpointError(
                "A directory of checkpoints must be one that all processes can write "
                f"to, got {directory} and in process {process_index()}: {failure}. "
                "Save to a file system that they share."
            ) from failure

    written = group.gather("pieces-written", write)
    if not group.is_chief:
        return ()
    return tuple(
        Piece(
            leaf=leaf,
            start=tuple(start),
            shape=tuple(shape),
            path=folder / f"{process}",
            offset=offset,
            crc32=crc32,
        )
        for process, pieces in enumerate(written)
        for leaf, start, shape, offset, crc32 in pieces
    )


def fill_in(arrays: list[np.ndarray], pieces: tuple[Piece, ...]) -> None:
    """Put the pieces that other processes have written into the arrays of a draft.

    Raises:
      CheckpointError: The content of a piece has changed.
    """
    for each in pieces:
        array = arrays[each.leaf]
        nbytes = math.prod(each.shape) * array.dtype.itemsize
        with each.path.open("rb") as file:
            file.seek(each.offset)
            data = file.read(nbytes)
        if zlib.crc32(data) != each.crc32:
            raise CheckpointError(
                f"`{each.path}` must be what another process wrote, got something "
                "else. Save to a file system that shows all processes the same files."
            )
        place = tuple(
            slice(at, at + size)
            for at, size in zip(each.start, each.shape, strict=True)
        )
        array[place] = np.frombuffer(data, array.dtype).reshape(each.shape)


def _write_pieces(draft: Draft, folder: Path, disk: Disk) -> list[tuple]:
    """Write all pieces here into one file, and return the place of each in it."""
    written: list[tuple] = []

    def parts() -> Iterator[bytes]:  # one at a time in memory
        offset = 0
        for leaf, pieces in draft.spread.items():
            for start, piece in pieces:
                data = np.asarray(piece).tobytes()
                written.append((leaf, start, piece.shape, offset, zlib.crc32(data)))
                offset += len(data)
                yield data

    disk.write_file(folder / f"{process_index()}", parts())
    return written


def _nothing() -> None:
    """Stand in for the action of the chief in another process."""


def _as_json(failure: Exception | None) -> list[str] | None:
    return None if failure is None else [type(failure).__name__, str(failure)]


def _from_json(kind: str, text: str) -> ReplicatorError:
    classes = {known.__name__: known for known in _KNOWN}
    return classes.get(kind, CheckpointError)(text)
