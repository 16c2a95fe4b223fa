"""Serve Python's own standard library as text: megabytes of it lie on every machine.

A token is a byte. Files go to training or are held out by a hash of their names, so the
split is the same wherever the library is; tests and installed packages are left out. So
is a file to be held out that is like one to train on, as one code page is like another:
of its longer lines, over a tenth stand in the text to train on.
"""

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from replicator.errors import ArgumentError

VOCABULARY = 256
_HELD_OUT_EVERY = 20
_LONGER = 24  # bytes, of lines that no two files have by chance
_MOST_SHARED = 0.1
_WINDOW = 1 << 15  # bytes that deflate looks back
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def read_text(
    sources: str | os.PathLike[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Read all sources, in the order of their names.

    Args:
      sources: Directory whose `.py` files are read; the standard library by default.

    Returns:
      Text to train on, and text that is held out: bytes, uint8.

    Raises:
      ArgumentError: It holds none for one of the two.

    >>> train, held_out = read_text()
    >>> held_out.size < train.size
    True
    """
    parts = read_files(sources)
    train, held_out = (np.frombuffer(b"".join(files), np.uint8) for files in parts)
    return train, held_out


def read_files(
    sources: str | os.PathLike[str] | None = None,
) -> tuple[list[bytes], list[bytes]]:
    """Return the files that `read_text` joins."""
    root = Path(sources or sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix()):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts):
            parts[is_held_out(name.as_posix())].append(path.read_bytes())
    known = {line for file in parts[0] for line in _longer_lines(file)}
    parts = parts[0], [file for file in parts[1] if shared(file, known) <= _MOST_SHARED]
    for use, files in zip(("to train on", "to hold out"), parts, strict=True):
        if not any(files):
            raise ArgumentError(
                f"`sources` must be a directory with Python files {use}, got {root}. "
                "Leave it out for the standard library."
            )
    return parts


def shared(file: bytes, known: Collection[bytes]) -> float:
    """Return the share of a file's longer lines that are known; 0 if it has none."""
    lines = _longer_lines(file)
    return sum(line in known for line in lines) / max(1, len(lines))


def gzip_bits(text: np.ndarray, *, learned: np.ndarray) -> float:
    """Return the bits that gzip needs for each byte of a text.

    It has seen as much of the text to train on as it can make use of: the last 32 KiB.
    """
    seen = learned[-_WINDOW:].tobytes()
    gzip = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=seen)
    return 8 * len(gzip.compress(text.tobytes()) + gzip.flush()) / len(text)


def _longer_lines(file: bytes) -> list[bytes]:
    lines = [line.strip() for line in file.splitlines()]
    return [line for line in lines if len(line) >= _LONGER]


def is_held_out(name: str) -> bool:
    """Return whether a document of this name is held out: about one in twenty is."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_EVERY == 0
