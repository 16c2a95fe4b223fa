"""List the checkpoints of a run: those in its journal, and those on disk."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from replicator.checkpoint.buckets.url import is_bucket_url
from replicator.checkpoint.commit import checkpoint_path, list_steps
from replicator.checkpoint.disk import walk_files
from replicator.checkpoint.manifest import read_manifest
from replicator.cli.look.report_page.run_files import RunFiles
from replicator.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLine:
    """One checkpoint.

    Attributes:
      step: Number of updates done.
      state: "there", "damaged" or "removed" (by retention, or by hand); "in a bucket"
        is not looked at.
      size_bytes: Size of its files; None if it is not there.
      time: When it was saved, by the journal; empty if that is not known.
    """

    step: int
    state: str
    size_bytes: int | None
    time: str


def list_checkpoints(run: RunFiles) -> list[CheckpointLine]:
    """Return what is known of a run's checkpoints, by step."""
    saved = {
        event["step"]: str(event.get("time", ""))
        for event in run.events
        if event.get("kind") == "saved" and isinstance(event.get("step"), int)
    }
    directory = find_directory(run)
    there = _steps_in(directory)
    if directory is None and any(map(is_bucket_url, _named(run))):
        return [
            CheckpointLine(step=step, state="in a bucket", size_bytes=None, time=time)
            for step, time in sorted(saved.items())
        ]
    return [
        _line(directory, step, step in there, saved.get(step, ""))
        for step in sorted(set(saved) | set(there))
    ]


def find_directory(run: RunFiles) -> Path | None:
    """Return a run's directory of checkpoints, recorded or inside its own."""
    inside = [run.directory / name for name in ("checkpoints", "checkpoint", ".")]
    for path in [*map(Path, _named(run)), *inside]:
        if _steps_in(path):
            return path
    return None


def _named(run: RunFiles) -> list[str]:
    arguments = run.record.get("arguments")
    named = [arguments.get("checkpoint_dir")] if isinstance(arguments, Mapping) else []
    # In this order: the directory of the newest checkpoint is that of the run.
    named += [event.get("directory") for event in reversed(run.events)]
    return [name for name in named if isinstance(name, str)]


def _steps_in(directory: Path | None) -> list[int]:
    try:
        return [] if directory is None else list_steps(directory)
    except OSError:
        return []


def _line(directory: Path | None, step: int, there: bool, time: str) -> CheckpointLine:
    if directory is None or not there:
        return CheckpointLine(step=step, state="removed", size_bytes=None, time=time)
    path = checkpoint_path(directory, step)
    size_bytes = 0
    try:
        read_manifest(path)
        state = "there"
        size_bytes = sum(file.stat().st_size for file in walk_files(path))
    except (CheckpointError, OSError):
        state = "damaged"
    return CheckpointLine(step=step, state=state, size_bytes=size_bytes, time=time)
