"""Keep compiled programs between runs, in a directory that only this user can touch.

A cached executable is code that will run: a directory that others may write to would
let them run theirs. One switch turns it off: `REPLICATOR_COMPILATION_CACHE=0`.
"""

import logging
import os
import pathlib
import stat

import jax

from replicator.base.host.paths import user_cache

ENVIRONMENT_VARIABLE = "REPLICATOR_COMPILATION_CACHE"
_log = logging.getLogger(__name__)


def enable_compilation_cache() -> pathlib.Path | None:
    """Let JAX keep compiled programs, unless the user chose otherwise.

    Returns:
      The directory; None if the cache is switched off, JAX already has one, or the
      directory is not private to this user.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return None
    # pyright does not know JAX's settings.
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore
        return None
    directory = user_cache() / "xla"
    if not _make_private(directory):
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return directory


def _make_private(directory: pathlib.Path) -> bool:
    """Create `directory` for this user alone; log a warning if that is impossible."""
    try:
        # The folder above, too: a user who can write there could replace this one.
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        return _is_closed(directory.parent, to=0o022) and _is_closed(
            directory, to=0o077
        )
    except OSError as error:
        _log.warning("no compilation cache: %s", error)
        return False


def _is_closed(directory: pathlib.Path, *, to: int) -> bool:
    found = directory.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & to:
        return True
    _log.warning(
        "no compilation cache: %s must be a directory of this user alone (0700), got "
        "mode %o of user %d. Run `chmod 700` on it, or remove it.",
        directory,
        mode,
        found.st_uid,
    )
    return False
