"""A directory of checkpoints in a file system: a rename commits, a lock shuts out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from replicator.checkpoint import commit as commits
from replicator.checkpoint.disk import Disk
from replicator.checkpoint.group import Group, require_shared
from replicator.checkpoint.lock import LOCK_NAME, WriterLock
from replicator.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    verify,
    verify_names,
)
from replicator.checkpoint.pieces.arrays import file_kvstore
from replicator.checkpoint.snapshot import Draft
from replicator.checkpoint.writing import ShardWriter
from replicator.errors import CheckpointError


class DiskDirectory:
    """A directory of checkpoints in a file system; its methods may raise OSError.

    Args:
      path: Its path.
      disk: The file system.
    """

    def __init__(self, path: Path, disk: Disk | None = None):
        self._path = path
        self._disk = disk or Disk()
        self._lock = WriterLock(path, self._disk)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self.require_current = self._lock.require_current

    def __str__(self) -> str:
        return str(self._path)

    @property
    def tokens(self) -> tuple[str, str]:
        """Tokens of the owner before this one, or "", and of this one."""
        return self._lock.tokens

    def make(self) -> bool:
        """Make it durably, with its parents; return whether checkpoints are here.

        Raises:
          CheckpointError: It holds other things.
        """
        there = (self._path, *self._path.parents)
        made = [path for path in there if not path.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for path in made:
            self._disk.sync_directory(path.parent)
        if self._has_checkpoints():
            return True
        names = (path.name for path in self._path.iterdir())
        require_none([name for name in names if not name.startswith(".")], self)
        return False

    def require_checkpoints(self) -> None:
        """Raise unless a store was ever opened here.

        Raises:
          CheckpointError: It is not a directory of checkpoints.
        """
        if not self._path.is_dir() or not self._has_checkpoints():
            what = "has no checkpoint" if self._path.is_dir() else "is not a directory"
            raise no_checkpoints(self, what)

    def require_shared(self, group: Group) -> None:
        """Check that all processes see it.

        Raises:
          CheckpointError: A process cannot write to it, or its file is not here.
        """
        require_shared(self._path, group, self._disk)

    def steps(self) -> list[int]:
        """List the steps that have a directory, damaged or not, in order."""
        return commits.list_steps(self._path) if self._path.is_dir() else []

    def read_manifest(self, step: int) -> Manifest:
        """Read the manifest of a step.

        Raises:
          CheckpointError: There is none, or it is damaged.
          CheckpointMismatchError: It is of a newer format.
        """
        return read_manifest(commits.checkpoint_path(self._path, step))

    def verify_names(self, manifest: Manifest) -> None:
        """Compare the files of a checkpoint with its manifest.

        Raises:
          CheckpointError: A file is damaged; the error names it.
        """
        verify_names(commits.checkpoint_path(self._path, manifest.step), manifest)

    def verify(self, manifest: Manifest) -> None:
        """Read all files of a checkpoint, and compare them with its manifest.

        Raises:
          CheckpointError: A file is damaged; the error names it.
        """
        verify(commits.checkpoint_path(self._path, manifest.step), manifest)

    def saved_at_s(self, step: int) -> float | None:
        """Return the time of a step's manifest, in seconds since 1970."""
        checkpoint = commits.checkpoint_path(self._path, step)
        return (checkpoint / MANIFEST_NAME).stat().st_mtime

    def kvstore(self, manifest: Manifest) -> AbstractContextManager[dict[str, Any]]:
        """Yield the folder of the arrays as a specification of TensorStore."""
        checkpoint = commits.checkpoint_path(self._path, manifest.step)
        return file_kvstore(checkpoint / manifest.state)

    def tidy(self, *, generation: int) -> list[str]:
        """Remove what dead writers left unfinished; see `commit.tidy`."""
        del generation  # whoever has the lock is the only one
        return commits.tidy(self._path, disk=self._disk)

    def commit(
        self, draft: Draft, *, group: Group, writer: ShardWriter, generation: int
    ) -> Manifest | None:
        """Write a checkpoint; see `commit.commit`."""
        return commits.commit(
            draft,
            self._path,
            group=group,
            writer=writer,
            generation=generation,
            disk=self._disk,
            require_current=self._lock.require_current,
        )

    def delete(self, step: int) -> None:
        """Delete a checkpoint; see `commit.delete`."""
        commits.delete(self._path, step, disk=self._disk)

    def set_damaged_aside(self, step: int) -> object:
        """Rename a damaged checkpoint, so that it is not used; return its new path."""
        return commits.set_damaged_aside(self._path, step, disk=self._disk)

    def _has_checkpoints(self) -> bool:
        return (self._path / LOCK_NAME).exists() or bool(self.steps())


def require_none(names: Sequence[str], directory: object) -> None:
    """Raise if there is something in a directory that is not of checkpoints.

    >>> require_none([], "runs")

    Raises:
      CheckpointError: There is.
    """
    if names:
        raise CheckpointError(
            f"A directory of checkpoints must hold nothing else, got {directory} with "
            f"`{min(names)}` in it. Save to a directory of its own."
        )


def no_checkpoints(directory: object, what: str) -> CheckpointError:
    """Return the error of a directory without checkpoints.

    >>> str(no_checkpoints("runs", "is not a directory"))
    '`directory` must be one that checkpoints were saved to, got runs, which is ...'
    """
    return CheckpointError(
        f"`directory` must be one that checkpoints were saved to, got {directory}, "
        f"which {what}. Check the path."
    )
