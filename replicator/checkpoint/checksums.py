"""Check whether files are, bit for bit, as they were written.

CRC-32 finds every single flipped bit and every burst of up to 32 bits, and takes 9 ms
per 32 MB where SHA-256 takes 19 and BLAKE2b 38. It protects against disks, not against
attackers, who could write the checksums as well.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from replicator.checkpoint.disk import walk_files

_CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Length and checksum of one file.

    Attributes:
      path: Path relative to the checkpoint, with forward slashes.
      size_bytes: Length of the file.
      crc32: Checksum of its content.
    """

    path: str
    size_bytes: int
    crc32: int


def record_file(path: Path, *, root: Path) -> FileRecord:
    """Read a file and return its length and checksum.

    >>> _ = Path("a").write_bytes(b"abc")
    >>> record_file(Path("a"), root=Path("."))
    FileRecord(path='a', size_bytes=3, crc32=891568578)
    """
    size_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(
        path=path.relative_to(root).as_posix(), size_bytes=size_bytes, crc32=crc32
    )


def record_bytes(path: str, content: bytes) -> FileRecord:
    """Return the length and checksum of a file with this content.

    >>> record_bytes("a", b"abc")
    FileRecord(path='a', size_bytes=3, crc32=891568578)
    """
    return FileRecord(path=path, size_bytes=len(content), crc32=zlib.crc32(content))


def first_damage(
    files: Sequence[FileRecord],
    folder: Path,
    *,
    root: Path,
    is_read: Callable[[str], bool] = bool,
) -> str | None:
    """Describe the first difference between the files in `folder` and their records.

    >>> Path("state").mkdir()
    >>> wanted = FileRecord(path="state/a", size_bytes=3, crc32=0)
    >>> first_damage([wanted], Path("state"), root=Path("."))
    '`state/a` is missing'

    Args:
      files: Records of the files.
      folder: Folder of the files, below `root`.
      root: Folder that recorded paths are relative to.
      is_read: Whether to read the file of a path, or to compare its length only; all
        are read by default.

    Returns:
      A text, or None if nothing differs.
    """
    there = {path.relative_to(root).as_posix(): path for path in walk_files(folder)}
    for wanted in files:
        path = there.pop(wanted.path, None)
        if path is None or path.is_symlink() or not path.is_file():
            return f"`{wanted.path}` is missing"
        size_bytes = path.stat().st_size
        if size_bytes != wanted.size_bytes:
            return (
                f"`{wanted.path}` has {size_bytes} bytes instead of {wanted.size_bytes}"
            )
        if is_read(wanted.path) and record_file(path, root=root) != wanted:
            return f"the content of `{wanted.path}` has changed"
    if there:
        return f"`{min(there)}` does not belong to it"
    return None
