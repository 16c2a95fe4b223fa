"""Find checkpoints in a directory and read the newest that is not damaged.

Needs no lock: a checkpoint is whole from the moment it has its name.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

from replicator.base.types import PyTree
from replicator.checkpoint.directories.named import Directory
from replicator.checkpoint.group import Group
from replicator.checkpoint.manifest import Manifest
from replicator.checkpoint.pieces.format1 import OrbaxState
from replicator.checkpoint.pieces.stored_state import ShardedState, StoredState
from replicator.checkpoint.placement import RestoredState, place_like, read_nested
from replicator.checkpoint.snapshot import OWN
from replicator.errors import BucketError, CheckpointError, CheckpointMismatchError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScannedDirectory:
    """Checkpoints in a directory.

    Attributes:
      manifests: Manifests in the order in which they were saved.
      damaged: Errors of unreadable manifests, by step.
    """

    manifests: tuple[Manifest, ...]
    damaged: Mapping[int, CheckpointError]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      step: Updates made.
      arrays: The state; nested dicts of NumPy arrays if no `like` was given.
      meta: JSON saved with it.
      own: JSON saved by each process for itself.
      metrics: Metrics saved with it, by name.
      lost: Guarantees that no longer hold, a sentence each.
      damaged: Newer steps that are damaged.
      source: "disk", or "memory" for the copies in launchers.
    """

    step: int
    arrays: PyTree
    meta: Mapping[str, Any]
    own: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, float]
    lost: tuple[str, ...] = ()
    damaged: tuple[int, ...] = ()
    source: Literal["disk", "memory"] = "disk"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Options of restoring a checkpoint.

    Attributes:
      like: A state of this run, or None.
      only: Pattern of paths to restore, or None for all.
      shardings: Shardings instead of those of `like`, or None.
    """

    like: PyTree = None
    only: str | None = None
    shardings: PyTree = None


def scan(directory: Directory) -> ScannedDirectory:
    """List the checkpoints of a directory.

    Raises:
      CheckpointError: It is not a directory of checkpoints.
      CheckpointMismatchError: A newer version wrote to it.
    """
    directory.require_checkpoints()
    manifests, damaged = [], {}
    for step in directory.steps():
        try:
            manifests.append(directory.read_manifest(step))
        except BucketError:
            raise
        except CheckpointError as failure:
            damaged[step] = failure
    # A run that started anew writes low steps after high ones: order by generation.
    manifests.sort(key=lambda manifest: (manifest.generation, manifest.step))
    return ScannedDirectory(manifests=tuple(manifests), damaged=damaged)


def restore_newest(
    directory: Directory, wanted: Wanted, group: Group
) -> Restored | None:
    """Read in all processes the newest checkpoint that none of them finds damaged.

    Returns:
      The checkpoint; None if there is none at all.

    Raises:
      CheckpointError: It is not a directory of checkpoints, or all are damaged.
      CheckpointMismatchError: The checkpoint holds another state than `wanted.like`.
    """

    def there() -> list[list[Any]]:
        found = scan(directory)
        for failure in found.damaged.values():
            _log.error("%s", failure)
        newest = [manifest.step for manifest in reversed(found.manifests)]
        return [newest, [[step, str(why)] for step, why in found.damaged.items()]]

    steps, unreadable = group.lead("steps", there)
    damaged = dict(unreadable)
    for step in steps:
        restored = failure = None
        try:
            restored = restore_step(directory, step, wanted)
        except (CheckpointError, CheckpointMismatchError) as error:
            failure = error
        try:
            group.require_all("restored", failure)
        except BucketError:  # not damaged: an older one would lose steps
            raise
        except CheckpointError as error:
            _log.error("%s The one before it is tried.", error)
            damaged[step] = str(error)
            continue
        assert restored is not None
        return dataclasses.replace(restored, damaged=tuple(sorted(damaged)))
    if damaged:
        reasons = "\n".join(damaged[step] for step in sorted(damaged))
        raise CheckpointError(
            f"`{directory}` must hold a checkpoint that is whole, got {len(damaged)}, "
            f"all damaged. Start anew in another directory.\n{reasons}"
        )
    return None


def restore_step(directory: Directory, step: int, wanted: Wanted) -> Restored:
    """Read the checkpoint of one step.

    Raises:
      CheckpointError: It is damaged or absent.
      CheckpointMismatchError: The checkpoint holds another state than `wanted.like`.
    """
    # No other manifest is read: a newer version may have written it.
    directory.require_checkpoints()
    steps = directory.steps()
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"`step` must be one that was saved, got {step} (there: {there}). "
            "Leave it out for the newest."
        )
    manifest = directory.read_manifest(step)
    directory.verify_names(manifest)
    with directory.kvstore(manifest) as kvstore:
        stored = OrbaxState if manifest.format == 1 else ShardedState
        return as_restored(manifest, stored(manifest, kvstore), wanted)


def as_restored(
    manifest: Manifest,
    state: StoredState,
    wanted: Wanted,
    *,
    source: Literal["disk", "memory"] = "disk",
) -> Restored:
    """Read the state of a checkpoint.

    Args:
      manifest: Manifest of the checkpoint.
      state: Its arrays.
      wanted: Options of restoring it.
      source: Where the arrays are.

    Raises:
      CheckpointError: The arrays are damaged.
      CheckpointMismatchError: They are those of another state than `wanted.like`.
    """
    placed = _place(wanted, manifest, state)
    for sentence in placed.lost:
        _log.warning("%s", sentence)
    meta = dict(manifest.meta)
    return Restored(
        step=manifest.step,
        arrays=placed.arrays,
        own=tuple(meta.pop(OWN, ())),
        meta=meta,
        metrics=manifest.metrics,
        lost=placed.lost,
        source=source,
    )


def _place(wanted: Wanted, manifest: Manifest, state: StoredState) -> RestoredState:
    if wanted.like is None:
        arrays = read_nested(manifest, state, only=wanted.only)
        return RestoredState(arrays=arrays, lost=())
    return place_like(
        wanted.like, manifest, state, only=wanted.only, shardings=wanted.shardings
    )
