"""Keep what removes old files from a folder that is in use.

`systemd-tmpfiles` takes whatever nobody has touched for ten days out of /tmp, but
leaves alone a folder that somebody has locked by `flock`, and all below it (tmpfiles.d,
"Age"; systemd.io/TEMPORARY_DIRECTORIES).
"""

import contextlib
import fcntl
import os


def hold_folder(path: str | os.PathLike[str]) -> int:
    """Return a descriptor; until it is closed, or its process dies, the folder stays.

    Args:
      path: Of the folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Shared: several processes of a run hold one. Not where a file system has no locks.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor
