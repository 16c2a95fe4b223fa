"""A directory of checkpoints: one run saves to it, any number of readers restore.

It joins modules and decides nothing: `snapshot` copies, `background` runs `commit` on a
thread, `retention` chooses what stays, `lock` shuts others out, `reading` restores,
`group` joins the processes of one program.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Self

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.types import PyTree
from replicator.checkpoint import reading
from replicator.checkpoint.background import BackgroundSaver, SaveCounts
from replicator.checkpoint.buckets.retries import LIMIT_S
from replicator.checkpoint.copies.copies import MemoryCopies, require_keeper
from replicator.checkpoint.directories.named import checked_directory, open_directory
from replicator.checkpoint.disk import Disk
from replicator.checkpoint.group import Group
from replicator.checkpoint.manifest import Manifest
from replicator.checkpoint.pieces.copy_place import (
    COPY_PLACES,
    CopyPlace,
    lack_of_memory_explained,
)
from replicator.checkpoint.retention import Retention, Saved
from replicator.checkpoint.snapshot import (
    OWN,
    Draft,
    Snapshot,
    plain_json,
    start_copy,
)
from replicator.checkpoint.writing import ShardWriter
from replicator.errors import ArgumentError, CheckpointError, check_count, check_word

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints in a directory.

    Reading needs no lock. To write, `open` it, or enter it (`with store:`): that takes
    the writer's lock. Several processes of one program all do so, and all call the same
    methods in the same order; the first one writes (`group`).

    A loop of your own may save after any call, also between the microbatches of an
    optimizer from `wrap_optimizer(accumulate=k)`, and resumes there bit for bit:

        with CheckpointStore(directory) as store:
            saved = store.restore(state)
            start = None
            if saved is not None:
                state = saved.arrays
                start = position_from_json(saved.meta["position"])
            for placed in rep.batches(dataset, start=start):
                state, metrics = step(state, placed)
                meta = {"position": placed.position.as_json()}
                done = placed.position.batches
                store.save_nowait(Snapshot(step=done, arrays=state, meta=meta))

    Args:
      directory: Directory of the checkpoints; made by `open` if absent.
      retention: Rule for checkpoints to keep.
      clock: Clock of all times.
      disk: The file system.
      failures_allowed: Number of saves in a row that may fail before training stops.
      timeout_s: Longest wait of a call for a save, or for another process, in seconds.
      copy: Place where a save copies the state to before it may be donated: each
        `"device"`, or leaf by leaf the `"host"`, where a device has no room for one.
      together: Whether all processes of the program save and restore together; by
        default, if there are several. If not, each needs a directory of its own.
      copies: Whether to copy to launchers, too; `restore` reads the newest of both.

    Attributes:
      copies: The copies in launchers, while the store is open; None for none.

    Raises:
      ArgumentError: A number is out of range, or there is no launcher for `copies`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        clock: Clock | None = None,
        disk: Disk | None = None,
        failures_allowed: int = 3,
        timeout_s: float = 600.0,
        copy: CopyPlace = "device",
        together: bool | None = None,
        copies: bool = False,
    ):
        check_count("failures_allowed", failures_allowed, "Leave it out for 3.")
        check_word("copy", copy, COPY_PLACES)
        if copies:
            require_keeper()
        self._copy: CopyPlace = copy
        checked = checked_directory("directory", directory)
        # A save makes many requests; no single one may take all of the time.
        limit_s = min(timeout_s / 5, LIMIT_S)
        self._directory = open_directory(checked, disk, limit_s=limit_s)
        self._retention = retention or Retention()
        self._clock = clock or SystemClock()
        self._failures_allowed = failures_allowed
        self._timeout_s = timeout_s
        self._group = Group(together=together, timeout_s=timeout_s)
        self._generation = 0
        self._kept: tuple[Saved, ...] = ()
        self._saver: BackgroundSaver | None = None
        self._writer = ShardWriter()
        self._has_copies = copies
        self.copies: MemoryCopies | None = None

    def open(self) -> Self:
        """Become the only writer of the directory, and remove leftovers of the last.

        Raises:
          CheckpointError: It cannot be written to, holds something else, or is not one
            that all processes see.
          CheckpointInUseError: Another run writes to it.
        """
        if self._saver is not None:
            return self
        times: Any = {"clock": self._clock, "timeout_s": self._timeout_s}
        tokens = self._group.lead("open", self._take_over)
        try:
            # At once: a run that is killed before they know of it has no copies.
            if self._has_copies:
                run = str(self._directory)
                self.copies = MemoryCopies(
                    self._group, run=run, make_draft=self._draft, **times
                )
                self.copies.take_over(*tokens, generation=self._generation)
            self._directory.require_shared(self._group)
            self._group.lead("tidy", self._tidy)
        except BaseException:
            self.close()
            raise
        self._saver = BackgroundSaver(self._commit, **times)
        return self

    def save_nowait(self, snapshot: Snapshot) -> bool:
        """Begin to save; return as soon as the state may be donated.

        One save runs at a time. While one does, another is not begun: it would delay
        training, or need one more copy of the state. That is counted and logged. The
        processes of one program agree on it.

        Args:
          snapshot: Snapshot to save.

        Returns:
          Whether a save was begun. Its result is logged and counted.

        Raises:
          ArgumentError: The snapshot cannot be saved, or the store is not open.
          CheckpointError: The last `failures_allowed` saves all failed.
          CheckpointInUseError: A newer run has taken the directory.
          DeviceMemoryError: The devices have no room for a copy of the state.
        """
        saver = self._require_open()
        own = plain_json(snapshot.own, "own")
        replies = self._group.share("save", {"busy": saver.is_busy(), "own": own})
        if replies[0]["busy"]:
            saver.skip(snapshot.step)
            return False
        saver.wait()  # at most until the chief reports the end of the last save
        saver.raise_if_failed(in_a_row=self._failures_allowed)
        saver.start(self._draft(snapshot, [reply["own"] for reply in replies]))
        return True

    def save(self, snapshot: Snapshot) -> None:
        """Save, and wait until the checkpoint is durable: for the last step of a run.

        Raises:
          ArgumentError: The snapshot cannot be saved, or the store is not open.
          CheckpointError: It could not be saved; older checkpoints are as before.
          CheckpointInUseError: A newer run has taken the directory.
          TimeoutError: It took too long.
        """
        saver = self._require_open()
        saver.wait()
        own = plain_json(snapshot.own, "own")
        saver.start(self._draft(snapshot, self._group.share("save-now", own)))
        saver.wait()
        saver.raise_if_failed(in_a_row=1)

    def wait(self) -> None:
        """Wait until no save runs, whether it succeeded or not.

        Raises:
          TimeoutError: It took longer than `timeout_s`.
        """
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait for the save that runs, and let another run write.

        Raises:
          TimeoutError: It took longer than `timeout_s`; the lock is kept.
        """
        try:
            if self.copies is not None:
                self.copies.close()
        finally:
            self.copies = None
            if self._saver is not None:
                self._saver.close()
                self._saver = None
                self._writer.close()
            self._directory.release()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def counts(self) -> SaveCounts:
        """Numbers of saves since the store was opened."""
        return self._saver.counts if self._saver is not None else SaveCounts()

    def steps(self) -> tuple[int, ...]:
        """List the saved steps, in the order in which they were saved.

        Raises:
          CheckpointError: It is not a directory of checkpoints.
        """
        manifests = reading.scan(self._directory).manifests
        return tuple(manifest.step for manifest in manifests)

    @property
    def best(self) -> int | None:
        """The step with the best metric of `retention`; None if none was measured."""
        manifests = reading.scan(self._directory).manifests
        return self._retention.best(map(self._as_saved, manifests))

    def restore(
        self,
        like: PyTree = None,
        *,
        step: int | None = None,
        only: str | None = None,
        shardings: PyTree = None,
    ) -> reading.Restored | None:
        """Read the newest checkpoint that is not damaged, or that of a step.

        A damaged one is logged, and the one before it is read. An open store renames it
        (`.damaged-...`), so that it is not used again. With `like`, all processes call
        this and get the same checkpoint.

        Args:
          like: A state of this run: arrays or `jax.ShapeDtypeStruct`s. Leaves get the
            shardings of its leaves. None gives nested dicts of NumPy arrays.
          step: Step to restore; the newest by default.
          only: Pattern of paths of leaves to restore; others are taken from `like`, or
            left out without it: `"user/params/*"`, where `*` matches slashes, too.
          shardings: Shardings instead of those of `like`; a list with that of each
            leaf, or a prefix of its tree.

        Returns:
          The checkpoint; None if nothing was saved yet.

        Raises:
          CheckpointError: It is not a directory of checkpoints, `step` is absent or
            damaged, or all checkpoints are damaged.
          CheckpointMismatchError: The checkpoint holds another state than `like`.
        """
        wanted = reading.Wanted(like=like, only=only, shardings=shardings)
        if step is not None:
            return reading.restore_step(self._directory, step, wanted)
        if self.copies is None or like is None:
            return self._restore_newest(wanted)
        kept = self._group.lead("newest", lambda: [each.step for each in self._kept])
        restored = self.copies.restore(wanted, newest=kept[-1] if kept else -1)
        restored = restored or self._restore_newest(wanted)
        self.copies.drop(above=-1 if restored is None else restored.step)
        return restored

    def _restore_newest(self, wanted: reading.Wanted) -> reading.Restored | None:
        alone = Group(together=False, timeout_s=self._timeout_s)
        group = alone if wanted.like is None else self._group
        restored = reading.restore_newest(self._directory, wanted, group)
        if restored is not None and self._saver is not None and self._group.is_chief:
            self._set_aside(restored.damaged)
        return restored

    def discard_after(self, step: int) -> tuple[int, ...]:
        """Delete the checkpoints after a step, for a run that goes back to it.

        Otherwise it would resume from one of them after a crash.

        Returns:
          The steps that were deleted.

        Raises:
          ArgumentError: The store is not open.
          CheckpointError: The directory cannot be written to.
          CheckpointInUseError: A newer run has taken the directory.
          TimeoutError: A save took too long.
        """
        self._require_open().wait()
        if self.copies is not None:
            self.copies.drop(above=step)
        return tuple(self._group.lead("discard", lambda: self._discard_after(step)))

    def _discard_after(self, step: int) -> list[int]:
        self._directory.require_current()
        later = [found for found in self._directory.steps() if found > step]
        with self._writing():
            # The highest first: a crash in between leaves a run that got less far.
            for found in reversed(later):
                self._directory.delete(found)
        self._kept = tuple(saved for saved in self._kept if saved.step <= step)
        return later

    def _take_over(self) -> Sequence[str]:
        with self._writing():
            there = self._directory.make()
            manifests = reading.scan(self._directory).manifests if there else ()
            newest = max((manifest.generation for manifest in manifests), default=0)
            self._generation = self._directory.acquire(above=newest)
        self._kept = tuple(map(self._as_saved, manifests))
        return self._directory.tokens

    def _tidy(self) -> None:
        with self._writing():
            left = self._directory.tidy(generation=self._generation)
        if left:
            _log.info("Tidied %s after a dead run: %s", self._directory, left)
            manifests = reading.scan(self._directory).manifests
            self._kept = tuple(map(self._as_saved, manifests))

    def _draft(self, snapshot: Snapshot, own: list[dict]) -> Draft:
        group = self._group
        draft = start_copy(
            snapshot, processes=group.processes, process=group.process, place=self._copy
        )
        if any(own):
            draft = dataclasses.replace(draft, meta={**draft.meta, OWN: own})
        return draft

    def _commit(self, draft: Draft) -> None:
        """Runs on the saver's thread."""
        with lack_of_memory_explained():  # a copy on a device may fail late
            manifest = self._directory.commit(
                draft,
                group=self._group,
                writer=self._writer,
                generation=self._generation,
            )
        if manifest is not None:
            self._retain(manifest)

    def _retain(self, manifest: Manifest) -> None:
        self._kept, gone = self._retention.decide(self._kept, self._as_saved(manifest))
        for step in gone:
            try:
                self._directory.delete(step)
            except (OSError, CheckpointError) as failure:
                _log.warning("Step %d could not be deleted: %r", step, failure)

    def _set_aside(self, damaged: tuple[int, ...]) -> None:
        for step in damaged:
            aside = self._directory.set_damaged_aside(step)
            _log.warning("The damaged step %d is kept as %s.", step, aside)
        self._kept = tuple(saved for saved in self._kept if saved.step not in damaged)

    def _as_saved(self, manifest: Manifest) -> Saved:
        metric = self._retention.metric
        return Saved(
            step=manifest.step,
            metric=None if metric is None else manifest.metrics.get(metric),
        )

    def _require_open(self) -> BackgroundSaver:
        if self._saver is None:
            raise ArgumentError(
                f"The store of `{self._directory}` must be open to save, got one that "
                "is not. Write `with store:`."
            )
        return self._saver

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            raise CheckpointError(
                f"A directory of checkpoints must be writable, got `{self._directory}`"
                f": {failure}. Choose another, or change its permissions."
            ) from failure
