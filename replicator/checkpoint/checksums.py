"""Tell whether a directory of files is, bit for bit, what was written.

CRC-32 finds every single flipped bit and every burst of up to 32 bits, and costs 9 ms
per 32 MB here where SHA-256 costs 19 and BLAKE2b 38. It protects against disks, not
against people: who can write the files can also write their checksums.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path

from replicator.checkpoint.disk import walk_files

_CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What one file must be.

    Attributes:
      path: Relative to the checkpoint, with forward slashes.
      size_bytes: Its length.
      crc32: The checksum of its content.
    """

    path: str
    size_bytes: int
    crc32: int


def record_file(path: Path, *, root: Path) -> FileRecord:
    """Read a file and record what it is."""
    size_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(
        path=path.relative_to(root).as_posix(), size_bytes=size_bytes, crc32=crc32
    )


def first_damage(
    files: Sequence[FileRecord], folder: Path, *, root: Path
) -> str | None:
    """Say how the files in `folder` differ from what was recorded.

    Args:
      files: What was recorded.
      folder: Where the files are, below `root`.
      root: What recorded paths are relative to.

    Returns:
      For example "`state/d/1f` has 10 bytes instead of 12"; None if nothing differs.
    """
    there = {path.relative_to(root).as_posix(): path for path in walk_files(folder)}
    for wanted in files:
        path = there.pop(wanted.path, None)
        if path is None or path.is_symlink() or not path.is_file():
            return f"`{wanted.path}` is missing"
        found = record_file(path, root=root)
        if found.size_bytes != wanted.size_bytes:
            return (
                f"`{wanted.path}` has {found.size_bytes} bytes instead of "
                f"{wanted.size_bytes}"
            )
        if found.crc32 != wanted.crc32:
            return f"the content of `{wanted.path}` has changed"
    if there:
        return f"`{min(there)}` does not belong to it"
    return None
