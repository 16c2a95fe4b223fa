"""Let one run at a time write to a directory, and shut out one that lost its place.

Two guards, as a lock alone cannot be trusted on every shared file system, nor where
somebody deletes the directory and makes it again:
- `flock` on a file: the operating system gives it back when its owner dies;
- the token of the owner in a file beside it: who finds another one than its own, right
  before a commit, or another lock file, has been replaced and commits no more (a
  fencing token: Kleppmann, "How to do distributed locking", 2016).
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path

from replicator.base.host.forks import register_fork_drop
from replicator.base.host.strict_json import strict_json
from replicator.checkpoint.disk import Disk
from replicator.errors import CheckpointInUseError

_NAME = ".writer"
LOCK_NAME, OWNER_NAME = f"{_NAME}.lock", f"{_NAME}.json"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who writes to a directory.

    Attributes:
      generation: Higher than that of all owners before.
      pid: Its process.
      host: The machine of the process.
      started_at: When it became the owner, for people.
      token: Random: in a directory that was made anew, generations begin anew.
    """

    generation: int
    pid: int
    host: str
    started_at: str
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started_at}"


class WriterLock:
    """The right to write to a directory, once `acquire` has returned.

    Args:
      directory: Must exist.
      disk: The file system.
      name: Of the files that say so, in the directory.
    """

    def __init__(self, directory: Path, disk: Disk, *, name: str = _NAME):
        self._directory = directory
        self._lock_path = directory / f"{name}.lock"
        self._owner_path = directory / f"{name}.json"
        self._disk = disk
        self._handle: int | None = None
        self._owner: Owner | None = None

    def acquire(self, *, above: int) -> int:
        """Become the owner, at once or not at all.

        Args:
          above: The highest generation that has committed.

        Returns:
          The generation of this owner.

        Raises:
          CheckpointInUseError: Another run is; its process and host are told.
        """
        handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # We never delete the file: a lock without a name keeps nobody out.
            self._lock(handle)
            last = self._read_owner()
            owner = Owner(
                generation=1 + max(above, last.generation if last else 0),
                pid=os.getpid(),
                host=socket.gethostname(),
                started_at=datetime.datetime.now()
                .astimezone()
                .isoformat(" ", "seconds"),
                token=os.urandom(8).hex(),
            )
            record = strict_json(dataclasses.asdict(owner)) + "\n"
            # Dying before this leaves the last owner's record, and a lock that is free.
            self._disk.replace_file(self._owner_path, record.encode())
        except BaseException:
            os.close(handle)
            raise
        self._handle, self._owner = handle, owner
        register_fork_drop(self)  # a forked input worker holds none when we are killed
        return owner.generation

    def require_current(self) -> None:
        """Return if the directory is the one that was locked, and has no other owner.

        Raises:
          CheckpointInUseError: It is not, or has.
        """
        owner = self._read_owner() or self._owner  # unread: the lock file still tells
        if owner == self._owner and self._is_in_place():
            return
        after = "a directory that was made anew" if owner == self._owner else owner
        raise CheckpointInUseError(
            f"`{self._directory}` must have this run as its only writer, got {after} "
            "after it. Nothing more is saved here: end this run."
        )

    def release(self) -> None:
        """Let others become the owner."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def drop_after_fork(self) -> None:
        """Hold nothing in a forked child; the parent still does."""
        # `flock` is of the open file, which a fork shares: closing this copy takes
        # nothing from the parent; kept, it would hold the lock when the parent is dead.
        self.release()

    def _is_in_place(self) -> bool:
        """Tell whether the lock that is held is the one that others would ask for."""
        assert self._handle is not None, "asked by the owner alone"
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._lock_path), os.fstat(self._handle))
        return False

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise CheckpointInUseError(
                f"`{self._directory}` must have one writer, got a second: "
                f"{self._read_owner() or 'another process'} writes to it. "
                "End that run, or choose another directory."
            ) from failure
        except OSError as failure:
            if failure.errno not in _NO_LOCKS_HERE:
                raise
            _log.warning(
                "The file system of %s has no locks: a second writer is noticed late, "
                "or not at all.",
                self._directory,
            )

    def _read_owner(self) -> Owner | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Owner(**json.loads(self._owner_path.read_bytes()))
        return None
