"""Files with the output of workers: one each, which only its owner can read.

Workers write to their file themselves. So a launcher that is slow, stopped or dead
holds none of them up, and the file is whole even if the launcher is not.
"""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from replicator.errors import LaunchError

_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100
_LAST_BYTES = 1 << 15
_LAST_LINES = 40

READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a log with: a link or a pipe in its place does not block a reader."""


def log_paths(folder: Path, workers: Iterable[str]) -> dict[str, Path]:
    """Return a file for each worker: `actor/2` has `actor-2.log`.

    Args:
      folder: Folder of the files.
      workers: Names, which differ; so do the files.

    >>> log_paths(Path("logs"), ["actor/2"])["actor/2"].name
    'actor-2.log'
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


def open_log(log: str | Path) -> int:
    """Open a file to append to, or make it; return its descriptor.

    `log_dir` may be a folder that others can write to: links and files that they put
    there are not written to.

    Raises:
      LaunchError: It is not a file of this user's own, or cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        # A pipe that nobody reads raises instead of waiting.
        descriptor = os.open(log, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise LaunchError(f"{log} cannot be written: {error}.") from error
    # Looked at after it was opened: nobody can exchange it any more.
    status = os.fstat(descriptor)
    is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    if is_file and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise LaunchError(
        f"`log_dir` must hold files of this user's only, got {str(log)!r} "
        f"({stat.filemode(status.st_mode)}, user {status.st_uid}, "
        f"{status.st_nlink} names). Choose another folder."
    )


def begin_attempt(log: Path, attempt: int) -> int:
    """Make the file, or begin a section for another attempt; return its size.

    Raises:
      LaunchError: It is not a file of this user's own.
    """
    descriptor = open_log(log)
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
      start: First byte of the part.
      end: Byte after its last; by default the end of the file.
    """
    try:
        with os.fdopen(os.open(log, READING), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = size if end is None else min(end, size)
            # The file may be huge. Lines of earlier attempts and runs, before `start`,
            # are not of this one.
            begin = max(start, end - _LAST_BYTES)
            file.seek(begin)
            data = file.read(max(0, end - begin))
    except OSError:
        return []
    lines = data.decode("utf-8", "backslashreplace").splitlines()
    return lines[-_LAST_LINES:]
