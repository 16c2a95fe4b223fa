"""Let one run at a time write to a directory, and shut out one that was replaced.

Two guards, as a lock alone is not reliable on every shared file system, nor if the
directory is deleted and made again:
- `flock` on a file: the operating system releases it when its owner dies;
- the token of the owner in a file beside it: an owner that finds another token, right
  before a commit, or another lock file, was replaced and commits no more (a fencing
  token: Kleppmann, "How to do distributed locking", 2016).
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
    """Writer of a directory.

    Attributes:
      generation: Higher than that of all owners before.
      pid: Id of its process.
      host: Name of its machine.
      started_at: Time when it became the owner, for people.
      token: Random text: in a directory made anew, generations begin anew.
    """

    generation: int
    pid: int
    host: str
    started_at: str
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started_at}"


def new_owner(generation: int) -> Owner:
    """Return this process as the owner of a generation, with a token of its own.

    >>> new_owner(3).generation
    3
    """
    return Owner(
        generation=generation,
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        token=os.urandom(8).hex(),
    )


def encode_owner(owner: Owner) -> bytes:
    """Return an owner as JSON.

    >>> owner = new_owner(1)
    >>> decode_owner(encode_owner(owner)) == owner
    True
    """
    return (strict_json(dataclasses.asdict(owner)) + "\n").encode()


def decode_owner(data: bytes) -> Owner | None:
    """Return the owner that `encode_owner` wrote; None if that is unreadable.

    >>> decode_owner(b"{")
    """
    with contextlib.suppress(ValueError, TypeError):
        return Owner(**json.loads(data))
    return None


class WriterLock:
    """The right to write to a directory, once `acquire` has returned.

    >>> lock = WriterLock(Path("."), Disk())
    >>> lock.acquire(above=0)
    1
    >>> lock.release()

    Args:
      directory: Directory, which must exist.
      disk: The file system.
      name: Stem of the lock's files in the directory.

    Attributes:
      tokens: Tokens of the owner before this one, empty if there was none, and of this
        one, once `acquire` has returned.
    """

    def __init__(self, directory: Path, disk: Disk, *, name: str = _NAME):
        self._directory = directory
        self._lock_path = directory / f"{name}.lock"
        self._owner_path = directory / f"{name}.json"
        self._disk = disk
        self._handle: int | None = None
        self._owner: Owner | None = None
        self.tokens = "", ""

    def acquire(self, *, above: int) -> int:
        """Become the owner, at once or not at all.

        Args:
          above: Highest generation that has committed.

        Returns:
          The generation of this owner.

        Raises:
          CheckpointInUseError: Another run is the owner; it is named with its host.
        """
        handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # The file is never deleted: a lock without a name shuts out no one.
            self._lock(handle)
            last = self._read_owner()
            owner = new_owner(1 + max(above, last.generation if last else 0))
            # Dying before this leaves the last owner's record, and a lock that is free.
            self._disk.replace_file(self._owner_path, encode_owner(owner))
        except BaseException:
            os.close(handle)
            raise
        self._handle, self._owner = handle, owner
        self.tokens = last.token if last else "", owner.token
        _HELD.add(self)
        register_fork_drop(self)  # a forked input worker holds none when we are killed
        return owner.generation

    def require_current(self) -> None:
        """Raise if the directory was made anew, or has another owner.

        Raises:
          CheckpointInUseError: It was made anew, or has another owner.
        """
        owner = self._read_owner() or self._owner  # unreadable: the lock file decides
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
            _HELD.discard(self)

    def drop_after_fork(self) -> None:
        """Hold nothing in a forked child; the parent still does."""
        # `flock` belongs to the open file, which a fork shares: closing this copy does
        # not unlock; kept, it would hold the lock after the parent's death.
        self.release()

    def _is_in_place(self) -> bool:
        """Return whether the lock file is still the one that others would open."""
        assert self._handle is not None, "called by the owner alone"
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
        with contextlib.suppress(OSError):
            return decode_owner(self._owner_path.read_bytes())
        return None


# Also of stores that were forgotten without being closed, which are never collected
# then: a forked child drops only what it can find.
_HELD: set[WriterLock] = set()
