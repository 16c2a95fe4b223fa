"""Where the output of workers is kept: one file each, which only its owner can read.

Workers write to their file themselves. So a launcher that is slow, stopped or dead
holds none of them up, and the file is whole whatever becomes of whom.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100
_LAST_BYTES = 1 << 15
_LAST_LINES = 40


def log_paths(folder: Path, workers: Iterable[str]) -> dict[str, Path]:
    """Return a file for each worker: `actor/2` has `actor-2.log`.

    Args:
      folder: Where they lie.
      workers: Names, which differ; so do the files.
    """
    paths: dict[str, Path] = {}
    taken: set[str] = set()
    for worker in workers:
        plain = _OTHER.sub("-", worker).strip("-.")[:_LONGEST_NAME] or "worker"
        name, number = plain, 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}.{number}"
        taken.add(name.lower())
        paths[worker] = folder / f"{name}.log"
    return paths


def begin_attempt(log: Path, attempt: int) -> int:
    """Make the file, or set the attempt apart from the one before; return its size."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(log, flags, 0o600)
    try:
        if attempt:
            os.write(descriptor, f"--- attempt {attempt}\n".encode())
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def last_lines(log: Path, start: int, end: int | None = None) -> list[str]:
    """Return the last few lines of a part of a log.

    Args:
      log: The file.
      start: Where the part begins, in bytes.
      end: Where it ends; by default with the file.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = size if end is None else min(end, size)
            begin = max(start, end - _LAST_BYTES)
            file.seek(begin)
            data = file.read(max(0, end - begin))
    except OSError:
        return []
    lines = data.decode("utf-8", "backslashreplace").splitlines()
    return lines[-_LAST_LINES:]
