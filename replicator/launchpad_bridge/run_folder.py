"""The private folder of a run: sockets, the secret of its servers, recipes, logs.

Only this user can enter it (0700), its path is short enough for sockets, and it is
removed with the run; logs that may be needed stay in it, without a lock. A launcher
that was killed can remove nothing: so the next one looks for folders whose lock is no
longer held, and removes those. The lock is removed last: a process that is killed while
it removes a folder leaves one that others remove. A folder that still has the lock's
first name after a minute was never finished.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from replicator.base.host.held_folder import hold_folder
from replicator.distributed.processes.guard import delete
from replicator.errors import LaunchError
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.addresses import folder_for_sockets

_PREFIX = "lp-"
_LOGS = "logs"
_LOCK = "launcher.lock"
_UNFINISHED_LOCK = "launcher.new"
_UNFINISHED_S = 60.0
MADE_BY_WORKER = "made-by-worker"
"""Marks a run's folder on a host where a worker made it, not the launcher."""
# A socket's path has 103 bytes on macOS; its name here takes at most ten.
_LONGEST_FOLDER_BYTES = 80


class RunFolder:
    """A folder that lives as long as the run; closing it removes it."""

    def __init__(self) -> None:
        """Make the folder, with a new secret in it.

        Raises:
          LaunchError: The folder cannot be made.
        """
        parent = _parent()
        remove_abandoned(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise LaunchError(
                f"A folder for the run must be made in {parent}, got {error}. Set "
                "TMPDIR to a directory that you can write to."
            ) from error
        # A cleaner of temporary folders would remove files that are not read for long.
        self._held = hold_folder(self.path)
        self._lock: IO[bytes] | None = _lock_made(self.path / _LOCK)
        Secret.generate().write(self.path / "secret")
        self.logs_path.mkdir(mode=0o700)

    @property
    def logs_path(self) -> Path:
        """Return the folder for the output of workers, which can outlive the run."""
        return self.path / _LOGS

    def close(self, *, keeps_logs: bool = False) -> None:
        """Remove the folder and all in it; may be called twice.

        Args:
          keeps_logs: Whether to leave logs, if there are any, and the folder for them.
        """
        _remove(self.path, keeps_logs=keeps_logs)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            os.close(self._held)


def what_stays(folder: Path, logs: Path) -> list[Path]:
    """Return the parts of a run's folder to keep when its launcher is gone.

    They are the logs, if they are in it, and the marks by which the next launch, or the
    next worker, knows that the rest may be removed.

    >>> what_stays(Path("/tmp/lp-1"), Path("/home/me/logs"))
    []
    """
    if not logs.is_relative_to(folder):
        return []
    return [logs, folder / _LOCK, folder / MADE_BY_WORKER]


def remove_abandoned(parent: str) -> None:
    """Remove the folders of launchers of this user that are gone."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid() or folder.is_symlink():
                continue
            if _was_never_finished(folder):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            lock = _locked(folder / _LOCK)
            if lock is not None:
                _remove(folder)
                lock.close()


def _was_never_finished(folder: Path) -> bool:
    """Return whether its launcher died before it made the lock."""
    # An empty one may be the user's own.
    if os.listdir(folder) != [_UNFINISHED_LOCK]:
        return False
    return time.time() - folder.stat().st_mtime > _UNFINISHED_S


def _remove(folder: Path, *, keeps_logs: bool = False) -> None:
    """Remove a folder and all in it, the lock last; keep only logs, if any."""
    logs, lock = folder / _LOGS, folder / _LOCK
    keeps_logs = keeps_logs and logs.exists() and any(logs.iterdir())
    delete(folder, keep=[lock, *([logs] if keeps_logs else [])])
    if keeps_logs:
        lock.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def is_held(folder: Path) -> bool:
    """Return whether the launcher of a run's folder lives.

    Raises:
      OSError: It has no lock: it is not the folder of a run, or not yet or no longer.
    """
    with (folder / _LOCK).open("rb") as file:
        try:
            # Shared: others may look at the same time.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _parent() -> str:
    folder = folder_for_sockets(_LONGEST_FOLDER_BYTES)
    if folder is None:
        raise LaunchError(
            f"TMPDIR must be at most {_LONGEST_FOLDER_BYTES} bytes long, without a "
            f"comma, for the sockets of a run, got {tempfile.gettempdir()!r}. Set "
            "TMPDIR=/tmp."
        )
    return folder


def _lock_made(path: Path) -> IO[bytes]:
    """Return the open file of a new lock, which is held before others can see it."""
    hidden = path.with_name(_UNFINISHED_LOCK)
    file = hidden.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    # Locked before it has its name: `launcher.lock` is never free while its launcher
    # lives. Dying before leaves `launcher.new` (`_was_never_finished`).
    hidden.rename(path)
    return file


def _locked(path: Path) -> IO[bytes] | None:
    """Return the open file of a lock if it could be taken; None if another holds it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
