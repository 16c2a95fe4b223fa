"""Paths of users: checked and made absolute; files and folders made durable."""

import os
import re
from pathlib import Path
from typing import overload

from replicator.errors import ArgumentError

# `Path` makes one slash of two; a drive of Windows has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with the home directory for `~` as in shells.

    It is the same after an `os.chdir`.

    >>> expanded("runs").is_absolute()
    True
    """
    return Path(os.path.expanduser(path)).absolute()


def user_cache() -> Path:
    """Return the folder of this user's files of replicator that may be deleted.

    >>> user_cache().name
    'replicator'
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    above = Path(chosen).absolute() if chosen else Path.home() / ".cache"
    return above / "replicator"


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk.

    >>> sync(Path("."))
    """
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

    >>> checked_path("directory", "gs://bucket/runs")
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `directory` must be a path of a file system, ...

    Raises:
      ArgumentError: It is neither None nor a path, is the URL of a bucket, or relative
        to a folder that is gone.
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


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds all of it, or what was there before.

    Args:
      path: The file.
      text: What to write.

    Raises:
      OSError: It cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "plan.json", "[]")
    ...     [each.name for each in Path(folder).iterdir()]
    ['plan.json']
    """
    # Not by `tempfile`, whose files other users, such as a colleague, cannot read.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
