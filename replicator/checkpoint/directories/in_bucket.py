"""A directory of checkpoints in a bucket."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from replicator.checkpoint.buckets import commit as commits
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.writer import BucketWriter
from replicator.checkpoint.checksums import record_bytes
from replicator.checkpoint.commit import (
    make_manifest,
    metadata_files,
    require_one_writer,
)
from replicator.checkpoint.directories.on_disk import no_checkpoints, require_none
from replicator.checkpoint.group import Group
from replicator.checkpoint.manifest import (
    STATE_NAME,
    Manifest,
    decode_at,
    encode,
    is_metadata,
)
from replicator.checkpoint.snapshot import Draft
from replicator.checkpoint.writing import ShardWriter
from replicator.errors import CheckpointError

_OURS = re.compile(r"\.|\d{12}/")


class BucketDirectory:
    """A directory of checkpoints in a bucket; its methods may raise BucketError.

    Args:
      bucket: The bucket, from the directory on.
    """

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._writer = BucketWriter(bucket)
        self.acquire, self.release = self._writer.acquire, self._writer.release
        self.require_current = self._writer.require_current
        # Saves that failed before their manifest: no process writes them any more
        # when the next one begins.
        self._failed: list[commits.Intent] = []

    def __str__(self) -> str:
        return str(self._bucket.url)

    @property
    def tokens(self) -> tuple[str, str]:
        """Tokens of the owner before this one, or "", and of this one."""
        return self._writer.tokens

    def make(self) -> bool:
        """Look whether it can be written to; return whether checkpoints are here.

        Raises:
          CheckpointError: It holds other things.
          BucketError: The bucket is not there, refused us, or did not answer.
        """
        self._bucket.require()
        keys = self._bucket.list()
        require_none([key for key in keys if not _OURS.match(key)], self)
        return self._has_checkpoints()

    def require_checkpoints(self) -> None:
        """Raise unless a store was ever opened here.

        Raises:
          CheckpointError: It is not a directory of checkpoints.
        """
        if not self._has_checkpoints():
            raise no_checkpoints(self, "has no checkpoint")

    def require_shared(self, group: Group) -> None:
        """Check that the bucket is open to all processes."""
        group.gather("shared", self._bucket.require)

    def steps(self) -> list[int]:
        """List the steps that have a manifest, damaged or not, in order."""
        return commits.list_steps(self._bucket)

    def read_manifest(self, step: int) -> Manifest:
        """Read the manifest of a step.

        Raises:
          CheckpointError: There is none, or it is damaged.
          CheckpointMismatchError: It is of a newer format.
        """
        key = commits.manifest_key(step)
        return decode_at(f"{self}/{key}", lambda: self._bucket.read(key) or b"")

    def verify_names(self, manifest: Manifest) -> None:
        """Compare the objects of a checkpoint with its manifest.

        Shards are not read: TensorStore verifies the checksums of what it reads.

        Raises:
          CheckpointError: An object is damaged; the error names it.
        """
        self._verify(manifest, lambda path: is_metadata(manifest, path))

    def verify(self, manifest: Manifest) -> None:
        """Read all objects of a checkpoint, and compare them with its manifest.

        Raises:
          CheckpointError: An object is damaged; the error names it.
        """
        self._verify(manifest, bool)

    def saved_at_s(self, step: int) -> float | None:
        """Return None: TensorStore does not give the times of objects."""
        del step

    def _verify(self, manifest: Manifest, is_read: Callable[[str], bool]) -> None:
        folder = commits.folder(manifest.step)
        there = self._bucket.list(f"{folder}/{manifest.state}/")
        wanted = {f"{folder}/{file.path}": file for file in manifest.files}
        missing = wanted.keys() - there
        # A list may be stale: what it lacks is asked for by its name.
        if any(self._bucket.read(key) is None for key in missing):
            raise self._damage(manifest, f"one of {sorted(missing)[:3]} is missing")
        if odd := {*there} - wanted.keys():
            raise self._damage(manifest, f"`{min(odd)}` does not belong to it")
        for key, file in wanted.items():
            if not is_read(file.path):
                continue
            if record_bytes(file.path, self._bucket.read(key) or b"") != file:
                raise self._damage(manifest, f"the content of `{key}` has changed")

    @contextlib.contextmanager
    def kvstore(self, manifest: Manifest) -> Iterator[dict[str, Any]]:
        """Yield the folder of the arrays as a specification of TensorStore."""
        folder = f"{commits.folder(manifest.step)}/{manifest.state}/"
        yield self._bucket.kvstore(folder)

    def tidy(self, *, generation: int) -> list[str]:
        """Remove what writers before this generation left unfinished."""
        return commits.sweep(self._bucket, generation=generation)

    def commit(
        self, draft: Draft, *, group: Group, writer: ShardWriter, generation: int
    ) -> Manifest | None:
        """Write a checkpoint, as all processes do together; its manifest last.

        Returns:
          The manifest of the checkpoint, in the first process; None in others.

        Raises:
          CheckpointError: A process failed, or the bucket.
          CheckpointInUseError: There is a newer writer.
        """
        begun: list[commits.Intent] = []
        done: list[Manifest] = []
        folder = commits.folder(draft.step)

        def begin() -> str:
            self.require_current()
            while self._failed:
                commits.abandon(self._bucket, self._failed[-1])
                self._failed.pop()
            state = f"{STATE_NAME}-{os.urandom(4).hex()}"
            intent = commits.begin(
                self._bucket, draft.step, state, generation=generation
            )
            begun.append(intent)
            return state

        state = group.lead("begin", begin)

        def put(name: str, data: bytes) -> None:
            self._bucket.put(f"{folder}/{name}", data)

        def write() -> list[Any]:
            return [
                dataclasses.astuple(file) for file in writer.write(draft, state, put)
            ]

        def finish() -> None:
            files = require_one_writer(draft, state, written)
            for name, content in metadata_files(draft, state):
                put(name, content)
                files.append(record_bytes(name, content))
            manifest = make_manifest(draft, state, files, generation=generation)
            self.require_current()
            # From here on it may be there, whatever answers say: nobody may abandon it.
            commits.publish(self._bucket, begun.pop(), encode(manifest))
            done.append(manifest)

        try:
            written = group.gather("written", write)
            group.lead("committed", finish)
        finally:
            self._failed += begun
        return done[0] if done else None

    def delete(self, step: int) -> None:
        """Delete a checkpoint; its manifest first."""
        commits.delete(self._bucket, step, generation=self._writer.generation)

    def set_damaged_aside(self, step: int) -> object:
        """Return its key: what is missing may be a copy that is still on its way."""
        return commits.manifest_key(step)

    def _has_checkpoints(self) -> bool:
        # A store leaves a marker; what plain tools have copied here may lack it.
        return self._bucket.is_marked() or bool(self.steps())

    def _damage(self, manifest: Manifest, what: str) -> CheckpointError:
        return CheckpointError(
            f"`{self}/{commits.folder(manifest.step)}` must be what was saved, got "
            f"damage: {what}. Restore an earlier step."
        )
