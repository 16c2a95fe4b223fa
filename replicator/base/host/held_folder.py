"""Keep cleaners of old files away from a folder that is in use.

`systemd-tmpfiles` removes files untouched for ten days from /tmp, but spares a folder
that is locked by `flock`, and all below it (tmpfiles.d, "Age";
systemd.io/TEMPORARY_DIRECTORIES).
"""

import contextlib
import fcntl
import os


def hold_folder(path: str | os.PathLike[str]) -> int:
    """Lock a folder against cleaners; return the descriptor that holds the lock.

    The lock ends when the descriptor is closed, or its process dies.

    >>> os.close(hold_folder("."))

    Args:
      path: Path of the folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Shared: several processes of a run hold one. Some file systems have no locks.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor
