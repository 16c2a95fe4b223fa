"""Let one run at a time write to a directory, and shut out one that lost its place.

Two guards, as a lock alone cannot be trusted on every shared file system:
- `flock` on a file: the operating system gives it back when its owner dies;
- a generation number that grows with every owner: who finds a higher one than its own,
  right before a commit, has been replaced and commits no more (a fencing token:
  Kleppmann, "How to do distributed locking", 2016).
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import json
import logging
import os
import socket
from pathlib import Path

from replicator.checkpoint.disk import Disk
from replicator.errors import CheckpointInUseError
from replicator.strict_json import strict_json

LOCK_NAME = ".writer.lock"
OWNER_NAME = ".writer.json"
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
    """

    generation: int
    pid: int
    host: str
    started_at: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started_at}"


class WriterLock:
    """The right to write to a directory, once `acquire` has returned.

    Args:
      directory: Must exist.
      disk: The file system.
    """

    def __init__(self, directory: Path, disk: Disk):
        self._directory = directory
        self._disk = disk
        self._handle: int | None = None
        self._generation = 0

    def acquire(self, *, above: int) -> int:
        """Become the owner, at once or not at all.

        Args:
          above: The highest generation that has committed.

        Returns:
          The generation of this owner.

        Raises:
          CheckpointInUseError: Another run is; its process and host are told.
        """
        handle = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(handle)
            last = self._read_owner()
            self._generation = 1 + max(above, last.generation if last else 0)
            owner = Owner(
                generation=self._generation,
                pid=os.getpid(),
                host=socket.gethostname(),
                started_at=datetime.datetime.now()
                .astimezone()
                .isoformat(" ", "seconds"),
            )
            record = strict_json(dataclasses.asdict(owner)) + "\n"
            self._disk.replace_file(self._directory / OWNER_NAME, record.encode())
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        _held.add(self)
        _release_in_forked_children()
        return self._generation

    def require_current(self) -> None:
        """Return if no other owner came after this one.

        Raises:
          CheckpointInUseError: One did.
        """
        owner = self._read_owner()
        if owner is not None and owner.generation > self._generation:
            raise CheckpointInUseError(
                f"`{self._directory}` must have this run as its only writer, got "
                f"{owner} after it. Nothing more is saved here: end this run."
            )

    def release(self) -> None:
        """Let others become the owner."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        _held.discard(self)

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise CheckpointInUseError(
                f"`{self._directory}` must have one writer, got a second: "
                f"{self._read_owner() or 'another process'} writes to it. "
                "End that run, or save to another directory."
            ) from failure
        except OSError as failure:
            if failure.errno not in _NO_LOCKS_HERE:
                raise
            _log.warning(
                "The file system of %s has no locks: a second writer is noticed only "
                "when it commits.",
                self._directory,
            )

    def _read_owner(self) -> Owner | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Owner(**json.loads((self._directory / OWNER_NAME).read_bytes()))
        return None


_held: set[WriterLock] = set()


@functools.cache  # what is registered is never forgotten
def _release_in_forked_children() -> None:
    """See that a forked input worker holds no lock after its parent was killed."""
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for lock in list(_held):
        lock.release()
