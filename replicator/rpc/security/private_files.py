"""Files that only their owner can read: made so, and refused when they are not."""

import os
import stat
from pathlib import Path

from replicator.errors import AuthenticationError


def create_private(path: str | os.PathLike[str]) -> int:
    """Make a new, empty file, mode 0600; return a descriptor to write to.

    Args:
      path: New file, in a directory of this user that others cannot write to.

    Raises:
      AuthenticationError: Others can write to the directory.
      FileExistsError: Something is there.
    """
    folder = Path(path).absolute().parent
    status = folder.stat()
    if _is_foreign(status) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AuthenticationError(
            f"`path` must lie in a directory that only its owner can write to, got "
            f"{str(folder)!r} ({stat.filemode(status.st_mode)}, user "
            f"{status.st_uid}). Use one made by `tempfile.mkdtemp()`."
        )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # whatever the umask
    return descriptor


def open_private(path: str | os.PathLike[str]) -> int:
    """Open a file that only its owner can read; return a descriptor to read from.

    Args:
      path: A regular file of this user, mode 0600 or less; no link.

    Raises:
      AuthenticationError: It is another thing, or others may have read or made it.
      OSError: It cannot be opened.
    """
    name = repr(os.fspath(path))
    if os.path.islink(path):
        raise AuthenticationError(_bad(name, "be no symbolic link", "one"))
    # Not blocked by a pipe that stands there, nor led elsewhere by a link.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        check_private(name, os.fstat(descriptor))
    except AuthenticationError:
        os.close(descriptor)
        raise
    return descriptor


def check_private(name: str, status: os.stat_result) -> None:
    """Return if an open file is one that only this user can read.

    Args:
      name: Name of the file in errors.
      status: Status of the open file, which cannot be exchanged after the check.

    Raises:
      AuthenticationError: It is not.
    """
    mode = stat.filemode(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise AuthenticationError(_bad(name, "be a regular file", mode))
    if _is_foreign(status):
        user = f"one of user {status.st_uid}"
        raise AuthenticationError(_bad(name, "belong to this user", user))
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise AuthenticationError(_bad(name, "be readable by its owner only", mode))


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid != os.geteuid()


def _bad(name: str, rule: str, found: str) -> str:
    return (
        f"The private file {name} must {rule}, got {found}. Make another: others may "
        "have read or made this one."
    )
