"""Journal of a table of turns: its rows, and the priorities that it applied.

    turns-<batch>-<rows>    base: the state before that batch, so many rows inserted
                            rows | rows | draw of the batch | rows | draw of the next

Each part is framed, with its length and CRC-32; one that was cut short, as its process
was killed, is the last, and counts as absent. Parts reach the operating system before
the table answers, so a killed process loses none. A host that loses power loses the end
of the last file at most: a file is durable before the next one is begun.
"""

import contextlib
import io
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from replicator.checkpoint.disk import Disk
from replicator.checkpoint.lock import WriterLock
from replicator.errors import (
    ArgumentError,
    CheckpointMismatchError,
    RpcError,
    check_count,
)
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.wire_format import in_one_piece

_FILES = "turns-"
_OURS = re.compile(r"turns-(\d{12,})-(\d{15,})")
_FRAME = struct.Struct("<IQQ")  # CRC-32 of the rest, bytes of head and of arrays
_FILE_BYTES = 64 << 20
_BASES = 4  # a file has at least as many times the bytes of its base

Part = dict[str, Any]
"""{"base"}, {"rows", "first"}: the serial of the first one; or {"draw", "due"}."""


class _File(NamedTuple):
    batch: int
    inserted: int
    path: Path


class TurnJournal:
    """The journal in a directory of its own; for one thread at a time."""

    def __init__(self, directory: Path, *, capacity: int, keep_batches: int) -> None:
        """Become the directory's only writer.

        Args:
          directory: Made if it is missing.
          capacity: Number of rows that the table holds: older ones are deleted.
          keep_batches: Number of batches that a learner may go back.

        Raises:
          ArgumentError: `keep_batches` is not a number from 1.
          CheckpointInUseError: Another table writes to it.
          CheckpointMismatchError: It holds something else.
        """
        check_count("keep_batches", keep_batches)
        self._directory, self._capacity = directory, capacity
        self._keep_batches = keep_batches
        self._disk = Disk()
        self._disk.make_directories(directory)
        names = sorted(path.name for path in directory.iterdir())
        if wrong := [n for n in names if n[0] != "." and not _OURS.fullmatch(n)]:
            raise CheckpointMismatchError(
                f"`checkpoint_dir` must be empty, or of a `ReplayTurns`, got "
                f"{directory} with {wrong[0]}. Choose another directory."
            )
        self._writer = WriterLock(directory, self._disk)
        self._writer.acquire(above=0)
        self._open: io.BufferedWriter | None = None  # the last file
        self._full_bytes = 0  # size at which another one is begun

    def close(self) -> None:
        """Let others write to the directory."""
        self._end_file()
        self._writer.release()

    def clear(self) -> None:
        """Delete all that was written."""
        self._end_file()
        for file in reversed(self._files()):
            file.path.unlink()

    def is_full(self) -> bool:
        """Return whether the next batch begins another file, with a base."""
        return self._open is None or self._open.tell() >= self._full_bytes

    def begin_file(self, base: dict[str, Any]) -> None:
        """Begin a file with the state before a batch; delete what nobody needs.

        Args:
          base: `batch` and `inserted` are in it.
        """
        self._writer.require_current()
        if self._open is not None:
            self._disk.sync_file(Path(self._open.name))
        self._end_file()
        self._disk.sync_directory(self._directory)  # also of what `clear` deleted
        name = f"{_FILES}{base['batch']:012}-{base['inserted']:015}"
        self._open = (self._directory / name).open("wb")
        self.write({"base": base})
        size = self._open.tell()
        self._full_bytes = size + max(_FILE_BYTES, _BASES * size)
        self._tidy(base["batch"])

    def write(self, part: Part) -> None:
        """Write a part behind the others; it is there if this process is killed."""
        assert self._open is not None, "`begin_file` comes first"
        encoded = encode(part)
        body = in_one_piece(encoded.buffers)
        rest = zlib.crc32(body, zlib.crc32(encoded.head))
        frame = _FRAME.pack(rest, len(encoded.head), len(body))
        self._open.writelines([frame, encoded.head, body])
        self._open.flush()

    def go_back(self, batch: int) -> Iterator[Part]:
        """Yield what leads to the state before a batch; then drop what came after.

        Returns:
          Parts with rows that the base does not count, then a base, and the rows and
          draws after it up to the draw of the batch before.

        Raises:
          ArgumentError: It has no draw of the batch before any more, or not yet.
        """
        self._end_file()
        files = self._files()
        own = [file for file in files if file.batch < batch]
        if files and not own:
            raise self.gone(batch)
        for file in own[:-1]:
            if self._holds_rows(file, files, own[-1].inserted):
                yield from (part for part, _ in _parts(file.path) if "rows" in part)
        last = own[-1].batch if own else 0
        for part, end in _parts(own[-1].path) if own else ():
            yield part
            last = part.get("draw", last - 1) + 1
            if last == batch:
                self._drop_after(files, own[-1], end)
                return
        raise ArgumentError(
            f"`cut` must be of a batch in `checkpoint_dir`, got batch {batch} for "
            f"{self._directory}, which ends at batch {last}. Go on from a checkpoint "
            "of the learner's up to there, or begin the run anew."
        )

    def gone(self, batch: int) -> ArgumentError:
        """Return the error for a batch of which not all rows are there any more."""
        return ArgumentError(
            f"`cut` must be of a batch in `checkpoint_dir`, got batch {batch} for "
            f"{self._directory}, which has not all its rows. Begin the run anew: "
            "without the learner's checkpoints."
        )

    def _drop_after(self, files: list[_File], last: _File, end: int) -> None:
        # The newest first, durably: whatever ends it leaves a journal without a gap.
        for file in reversed(files):
            if file.batch > last.batch:
                file.path.unlink()
        self._disk.sync_directory(self._directory)
        os.truncate(last.path, end)
        self._open = last.path.open("ab")
        self._full_bytes = max(end, _FILE_BYTES)

    def _tidy(self, batch: int) -> None:
        """Delete files that going back by `keep_batches` does not need."""
        files = self._files()
        first = [file for file in files if file.batch < batch - self._keep_batches]
        for file in first[:-1]:
            if not self._holds_rows(file, files, first[-1].inserted):
                file.path.unlink()

    def _holds_rows(self, file: _File, files: list[_File], inserted: int) -> bool:
        """Return whether a file, not the last, has rows that are held by then."""
        following = files[files.index(file) + 1]
        return following.inserted > inserted - self._capacity

    def _files(self) -> list[_File]:
        found = []
        for path in self._directory.glob(f"{_FILES}*"):
            if name := _OURS.fullmatch(path.name):
                found.append(_File(int(name[1]), int(name[2]), path))
        return sorted(found)

    def _end_file(self) -> None:
        file, self._open = self._open, None
        if file is not None:
            # Raises again after a write that failed; what was whole was flushed.
            with contextlib.suppress(OSError):
                file.close()


def _parts(path: Path) -> Iterator[tuple[Part, int]]:
    """Yield the whole parts of a file, and where each ends."""
    with path.open("rb") as file:
        while len(start := file.read(_FRAME.size)) == _FRAME.size:
            crc32, head_bytes, body_bytes = _FRAME.unpack(start)
            left = path.stat().st_size - file.tell()
            if head_bytes + body_bytes > left:
                return
            content = memoryview(file.read(head_bytes + body_bytes))
            if zlib.crc32(content) != crc32:
                return
            try:
                part = decode(content[:head_bytes], content[head_bytes:])
            except (ValueError, RpcError):
                return
            yield part, file.tell()
