"""Paths: absolute from where a user handed them over, and checked; made durable."""

import os
import re
from pathlib import Path
from typing import overload

from replicator.errors import ArgumentError

# `Path` makes one slash of two; a drive of Windows has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home directory for its `~`, as shells do, and absolute.

    What it names is the same after an `os.chdir`.
    """
    return Path(os.path.expanduser(path)).absolute()


def sync(path: Path) -> None:
    """Return when a file's content, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@overload
def checked_path(name: str, value: None) -> None: ...
@overload
def checked_path(name: str, value: str | os.PathLike[str]) -> Path: ...
def checked_path(name: str, value: object) -> Path | None:
    """Return the argument `name` as `expanded` does; None stays None.

    Raises:
      ArgumentError: It is neither None nor a path, or it is the URL of a bucket, or
        relative to a folder that is gone.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(
            f"`{name}` must be a path, got {value!r}. Pass a `str` or a `Path`."
        )
    # As a path it would be a folder of that name, on a disk that may be lost.
    if _URL.match(os.fsdecode(value)):
        raise ArgumentError(
            f"`{name}` must be a path of a file system, got {os.fsdecode(value)!r}. "
            "Mount the bucket (on all hosts, with atomic renames), and name its folder."
        )
    try:
        return expanded(os.fsdecode(value))
    except FileNotFoundError:
        raise ArgumentError(
            f"`{name}` must be absolute where the working folder is gone, got "
            f"{value!r}. Change to a folder that is there."
        ) from None
