"""Let processes save and restore as one, by exchange: the first writes for all.

What is equal everywhere is written by process 0, the chief. Of a leaf that is cut over
processes each holds some pieces: the others write theirs beside the checkpoint, and the
chief puts them together, so that what is saved looks the same whatever number of
processes there was, and however the leaf was cut. All processes therefore see the
directory. What the chief meets is raised in all of them: they go on together, or end
together.
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
    CheckpointError,
    CheckpointInUseError,
    CheckpointMismatchError,
    ReplicatorError,
)

_KNOWN = (CheckpointInUseError, CheckpointMismatchError)
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A piece of one leaf that another process has written.

    Attributes:
      leaf: Which leaf of the draft.
      start: Where it begins on each axis of the leaf.
      shape: How far it goes from there.
      path: The file that it is in.
      offset: Bytes before it there.
      crc32: Of its own.
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
      together: Whether there are others; by default if the program has several.
      timeout_s: Longest wait for one.
    """

    def __init__(self, *, together: bool | None, timeout_s: float) -> None:
        self.together = process_count() > 1 if together is None else together
        self.is_chief = not self.together or process_index() == 0
        self._timeout_s = timeout_s
        self._name = f"checkpoint-{next(_numbers)}" if self.together else ""

    def tell(self, what: str, word: Any) -> list[Any]:
        """Return what each process said; this one's word where it is alone."""
        if not self.together:
            return [word]
        return exchange(f"{self._name}/{what}", word, timeout_s=self._timeout_s)

    def lead(self, what: str, action: Callable[[], Json]) -> Any:
        """Let the chief act; return in all processes what it returned.

        Raises:
          CheckpointError: The chief failed; in the chief itself, whatever it raised.
        """
        return self.gather(what, action if self.is_chief else _nothing)[0]

    def gather(self, what: str, action: Callable[[], Json]) -> list[Any]:
        """Let each process act; return in all of them what each returned.

        Raises:
          CheckpointError: One failed; in that process itself, whatever it raised.
        """
        failure, value = None, None
        try:
            value = action()
        except Exception as error:  # told to the others, then raised
            failure = error
        said = self.tell(what, {"value": value, "failure": _told(failure)})
        if failure is not None:
            raise failure
        for word in said:
            if word["failure"] is not None:
                raise _heard(*word["failure"])
        return [word["value"] for word in said]

    def require_all(self, what: str, failure: Exception | None) -> None:
        """Return if no process failed.

        Raises:
          CheckpointError: One did; in that process itself, `failure`.
        """
        said = self.tell(what, _told(failure))
        if failure is not None:
            raise failure
        for process, word in enumerate(said):
            if word is not None:
                kind, text = word
                raise _heard(kind, f"Process {process}: {text}")


def share_pieces(
    draft: Draft, directory: Path, *, group: Group, disk: Disk
) -> tuple[Piece, ...]:
    """Let all others write their pieces of a draft; return those, to the chief.

    Args:
      draft: Of each process.
      directory: Of all checkpoints.
      group: The processes.
      disk: The file system.

    Raises:
      CheckpointError: A process could not write its pieces.
    """
    if not (group.together and draft.spread):
        return ()

    def begin() -> str:
        # By its name a leftover, if the chief dies: the next owner removes it.
        name = f".writing-pieces-{draft.step}-{os.urandom(4).hex()}"
        disk.make_directory(directory / name)
        return name

    # On the saver's thread of each process. Each word is a barrier: the folder is there
    # before pieces are written, all of them before the chief reads one.
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

    said = group.gather("pieces-written", write)
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
        for process, pieces in enumerate(said)
        for leaf, start, shape, offset, crc32 in pieces
    )


def fill_in(arrays: list[np.ndarray], pieces: tuple[Piece, ...]) -> None:
    """Put the pieces that other processes have written into the arrays of a draft.

    Raises:
      CheckpointError: They are not what was written.
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
                "else. Save to a file system that shows all processes the same."
            )
        place = tuple(
            slice(at, at + size)
            for at, size in zip(each.start, each.shape, strict=True)
        )
        array[place] = np.frombuffer(data, array.dtype).reshape(each.shape)


def _write_pieces(draft: Draft, folder: Path, disk: Disk) -> list[tuple]:
    """Write all pieces here into one file, and return what is known of each."""
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
    """Act for the chief, where that is another process."""


def _told(failure: Exception | None) -> list[str] | None:
    return None if failure is None else [type(failure).__name__, str(failure)]


def _heard(kind: str, text: str) -> ReplicatorError:
    classes = {known.__name__: known for known in _KNOWN}
    return classes.get(kind, CheckpointError)(text)
