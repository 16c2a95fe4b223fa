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
from collections.abc import Collection, Iterator
from pathlib import Path

import grain
import numpy as np

from experiments.pipeline_batches import pipeline_batches
from replicator.errors import ArgumentError, check_whole
from replicator.inputs import InputContext

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
    root = Path(sources or sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix()):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts):
            parts[_is_held_out(name.as_posix())].append(path.read_bytes())
    known = {line for file in parts[0] for line in _longer_lines(file)}
    parts = parts[0], [file for file in parts[1] if shared(file, known) <= _MOST_SHARED]
    for use, files in zip(("to train on", "to hold out"), parts, strict=True):
        if not any(files):
            raise ArgumentError(
                f"`sources` must be a directory with Python files {use}, got {root}. "
                "Leave it out for the standard library."
            )
    train, held_out = (np.frombuffer(b"".join(files), np.uint8) for files in parts)
    return train, held_out


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


def train_input_fn(
    context: InputContext,
    text: np.ndarray,
    *,
    global_batch: int,
    length: int,
    seed: int,
) -> grain.IterDataset:
    """Yield full batches for ever: windows of the text, shuffled anew in each epoch.

    Args:
      context: Which pipeline reads.
      text: Bytes, more than a window.
      global_batch: Windows per update.
      length: Tokens that are predicted in each.
      seed: Of the order.

    Returns:
      An endless dataset of {"tokens": int32 [b, length + 1]}.

    Raises:
      ArgumentError: The text is shorter than a window.
    """
    windows = grain.MapDataset.source(_Windows(text, length)).seed(seed).shuffle()
    return pipeline_batches(windows.repeat(), context, global_batch=global_batch)


def held_out_batches(
    text: np.ndarray, *, batch: int, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield a text in windows that predict each of its bytes once, but the first.

    Windows overlap by half: what is predicted has that much text before it.

    Args:
      text: Bytes, more than a window.
      batch: Windows at a time; the last are fewer.
      length: Tokens before and after which a window ends.

    Yields:
      {"tokens": int32 [b, length + 1], "counts": float32 [b, length]}; the latter is 1
      where a token is counted.

    Raises:
      ArgumentError: The text is shorter than a window.
    """
    _check_length(text, length)
    last = len(text) - length - 1
    starts = [*range(0, last, length // 2), last]
    seen, rows = 1, []
    for start in starts:
        counted = np.arange(start + 1, start + length + 1) >= seen
        rows.append((text[start : start + length + 1], counted))
        seen = start + length + 1
        if len(rows) == batch or start == last:
            tokens, counts = map(np.stack, zip(*rows, strict=True))
            yield {
                "tokens": tokens.astype(np.int32),
                "counts": counts.astype(np.float32),
            }
            rows = []


class _Windows:
    """A text as windows side by side, each with the token before it."""

    def __init__(self, text: np.ndarray, length: int) -> None:
        _check_length(text, length)
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._length
        window = self._text[start : start + self._length + 1]
        return {"tokens": window.astype(np.int32)}


def _check_length(text: np.ndarray, length: int) -> None:
    check_whole("length", length)
    if not 2 <= length < len(text):
        raise ArgumentError(
            f"`length` must be at least 2 and below the {len(text)} bytes of the text, "
            f"got {length}. Use 128, and more text."
        )


def _longer_lines(file: bytes) -> list[bytes]:
    lines = [line.strip() for line in file.splitlines()]
    return [line for line in lines if len(line) >= _LONGER]


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_EVERY == 0
