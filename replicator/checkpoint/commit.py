"""Write a checkpoint beside the others, make it durable, and only then give it a name.

The order of writes is: content of files, names in directories, the new name, the name
in its parent. A crash leaves a directory that starts with a dot: either one that is not
a checkpoint and that the next owner removes, or a former checkpoint that gets its name
back. After `commit` returned, power may fail.
"""

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from replicator.base.host.strict_json import strict_json
from replicator.checkpoint.checksums import FileRecord, record_bytes
from replicator.checkpoint.disk import Disk, walk_directories
from replicator.checkpoint.group import Group
from replicator.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    Manifest,
    encode,
)
from replicator.checkpoint.pieces.arrays import (
    GROUP,
    METADATA_NAME,
    array_metadata,
    shard_name,
)
from replicator.checkpoint.pieces.grid import cells, whole_box
from replicator.checkpoint.snapshot import Draft
from replicator.checkpoint.writing import ShardWriter
from replicator.errors import CheckpointError

_WRITING, _DELETING, _DAMAGED = ".writing-", ".deleting-", ".damaged-"
_REPLACED = ".replaced-"
_LEFTOVERS = (_WRITING, _DELETING, _REPLACED)
_DIGITS = 12
_NAME = re.compile(rf"\d{{{_DIGITS}}}")
_log = logging.getLogger(__name__)


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step.

    >>> checkpoint_path(Path("runs"), 7).name
    '000000000007'
    """
    return directory / f"{step:0{_DIGITS}d}"


def list_steps(directory: Path) -> list[int]:
    """List the steps that have a directory, damaged or not, in order.

    >>> checkpoint_path(Path("."), 7).mkdir()
    >>> list_steps(Path("."))
    [7]
    """
    names = (path.name for path in directory.iterdir() if path.is_dir())
    return sorted(int(name) for name in names if _NAME.fullmatch(name))


def commit(
    draft: Draft,
    directory: Path,
    *,
    group: Group,
    writer: ShardWriter,
    generation: int,
    disk: Disk,
    require_current: Callable[[], None],
) -> Manifest | None:
    """Write a checkpoint; return when it is whole and durable.

    All processes call it; each exchange is a barrier. The folder is there before shards
    are written, and all shards before the manifest.

    Args:
      draft: Draft to save.
      directory: Directory of all checkpoints.
      group: The processes that save together.
      writer: Writes the shards of this process.
      generation: Generation of the owner of the directory.
      disk: The file system.
      require_current: Raises if there is a newer owner; called first and last.

    Returns:
      The manifest of the checkpoint, in the first process; None in others.

    Raises:
      OSError: The file system failed; nothing is left of the attempt.
      CheckpointError: Another process failed.
      CheckpointInUseError: From `require_current`.
    """

    def begin() -> str:
        require_current()
        tidy(directory, disk=disk)  # a save that failed may have left files
        return _make_folders(draft, directory, disk=disk)

    token = group.lead("begin", begin)
    writing = directory / f"{_WRITING}{draft.step}-{token}"
    state = writing / f"{STATE_NAME}-{token}"
    done: list[Manifest] = []

    def write() -> list[Any]:
        disk.announce("write_arrays", state)
        files = writer.write(
            draft, state.name, lambda name, data: disk.write_file(writing / name, data)
        )
        return [dataclasses.astuple(file) for file in files]

    def finish() -> None:
        files = require_one_writer(draft, state.name, written)
        _require_shards(state, files)
        done.append(_finish(draft, state, files, generation=generation, disk=disk))
        require_current()
        # A new owner between these two is not noticed: only `flock` prevents that.
        _give_name(writing, checkpoint_path(directory, draft.step), disk=disk)

    try:
        written = group.gather("written", write)
        group.lead("committed", finish)
    except BaseException:
        if group.is_chief:
            _abandon(writing, disk=disk)
        raise
    return done[0] if done else None


def delete(directory: Path, step: int, *, disk: Disk) -> None:
    """Delete a checkpoint; it is renamed first, so that a part is never read as one."""
    aside = _move_aside(checkpoint_path(directory, step), _DELETING, disk=disk)
    if aside is not None:
        _remove(aside, disk=disk)


def set_damaged_aside(directory: Path, step: int, *, disk: Disk) -> Path | None:
    """Rename a damaged checkpoint, so that it is not used, and keep it to inspect."""
    return _move_aside(checkpoint_path(directory, step), _DAMAGED, disk=disk)


def tidy(directory: Path, *, disk: Disk) -> list[str]:
    """Remove leftovers of owners that died while writing or deleting; return names.

    A checkpoint that was moved aside for a new one that was never finished gets its
    name back. A leftover that cannot be removed is logged, and tried again next time.
    """
    done: list[str] = []
    for path in sorted(directory.iterdir()):
        name = path.name
        checkpoint = directory / name.removeprefix(_REPLACED)[:_DIGITS]
        if name.startswith(_REPLACED) and not checkpoint.exists():
            disk.rename(path, checkpoint)
            disk.sync_directory(directory)
            done.append(name)
        elif name.startswith(_LEFTOVERS) or path.suffix == ".draft":
            done += [name] if _remove(path, disk=disk) else []
    return done


def metadata_files(draft: Draft, state: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files that make the arrays those of zarr."""
    yield f"{state}/{METADATA_NAME}", GROUP.encode()
    paths = {str(number): leaf.path for number, leaf in enumerate(draft.leaves)}
    for array in draft.plan.arrays:
        path = paths.get(array.name)
        attributes = {"path": path} if path is not None else {}
        content = strict_json(array_metadata(array, attributes))
        yield f"{state}/{array.name}/{METADATA_NAME}", content.encode()


def make_manifest(
    draft: Draft, state: str, files: Sequence[FileRecord], *, generation: int
) -> Manifest:
    """Return the manifest of a draft whose files are written."""
    return Manifest(
        step=draft.step,
        generation=generation,
        meta=draft.meta | (draft.late() if draft.late is not None else {}),
        metrics=draft.metrics,
        num_devices=draft.num_devices,
        leaves=draft.leaves,
        files=tuple(files),
        state=state,
        stored=draft.plan.leaves,
        arrays=draft.plan.arrays,
        writers=draft.plan.writers,
    )


def require_one_writer(
    draft: Draft, state: str, written: Sequence[Sequence[Any]]
) -> list[FileRecord]:
    """Return the records of all shards, each of which one process has written.

    Args:
      draft: Draft that was written.
      state: Folder of the arrays.
      written: For each process, its records as tuples.

    Raises:
      CheckpointError: There is not one writer of each shard.
    """
    files = [_file(*file) for own in written for file in own]
    wanted = {
        f"{state}/{array.name}/{shard_name(index)}"
        for array in draft.plan.arrays
        for index, _ in cells(whole_box(array.shape), array.shard)
    }
    there = {file.path for file in files}
    if wanted != there or len(files) != len(wanted):
        odd = min(wanted ^ there, default="one that several wrote")
        raise CheckpointError(
            "`arrays` must be cut alike in all processes, got a shard that is not the "
            f"only one of its place: {odd}. Save one global state in all of them."
        )
    return files


def _make_folders(draft: Draft, directory: Path, *, disk: Disk) -> str:
    """Make the folders of a checkpoint; return the token in their names."""
    # Random: a writer that was replaced removes nothing of the new one's, and a file of
    # another save is never taken for one of this.
    token = os.urandom(4).hex()
    writing = directory / f"{_WRITING}{draft.step}-{token}"
    state = writing / f"{STATE_NAME}-{token}"
    try:
        for folder in (writing, state):
            disk.make_directory(folder)
        for array in draft.plan.arrays:
            disk.make_directory(state / array.name)
    except BaseException:
        _abandon(writing, disk=disk)
        raise
    return token


def _finish(
    draft: Draft,
    state: Path,
    files: list[FileRecord],
    *,
    generation: int,
    disk: Disk,
) -> Manifest:
    """Write what is not a shard, the manifest last, and make all names durable."""
    for name, content in metadata_files(draft, state.name):
        disk.write_file(state.parent / name, content)
        files.append(record_bytes(name, content))
    manifest = make_manifest(draft, state.name, files, generation=generation)
    disk.write_file(state.parent / MANIFEST_NAME, encode(manifest))
    for folder in walk_directories(state.parent):
        disk.sync_directory(folder)
    return manifest


def _abandon(writing: Path, *, disk: Disk) -> None:
    with contextlib.suppress(OSError):
        disk.remove_tree(writing)


def _file(path: str, size_bytes: int, crc32: int) -> FileRecord:
    return FileRecord(path=path, size_bytes=size_bytes, crc32=crc32)


def _require_shards(state: Path, files: Sequence[FileRecord]) -> None:
    """Check that the shards of other processes are here."""
    for each in files:
        path, size_bytes = each.path, each.size_bytes
        file = state.parent / path
        if not file.exists() or file.stat().st_size != size_bytes:
            raise CheckpointError(
                "A directory of checkpoints must be one that all processes share, got "
                f"{state.parent.parent}, where {path} of another process is not whole. "
                "Save to a file system that shows all processes the same files."
            )


def _give_name(writing: Path, checkpoint: Path, *, disk: Disk) -> None:
    # A run that went back to an earlier step may save the same step again.
    replaced = _move_aside(checkpoint, _REPLACED, disk=disk)
    try:
        # If the process dies here, `tidy` gives the one moved aside its name back.
        disk.rename(writing, checkpoint)
    except OSError:
        if replaced is not None:
            disk.rename(replaced, checkpoint)
        raise
    # Readers see it from here on; a power failure may still undo the rename.
    disk.sync_directory(checkpoint.parent)
    if replaced is not None:
        _remove(replaced, disk=disk)


def _move_aside(checkpoint: Path, prefix: str, *, disk: Disk) -> Path | None:
    if not checkpoint.exists():
        return None
    number = 0
    while (aside := checkpoint.parent / f"{prefix}{checkpoint.name}-{number}").exists():
        number += 1
    disk.rename(checkpoint, aside)
    return aside


def _remove(path: Path, *, disk: Disk) -> bool:
    """Remove a folder or a file that is not a checkpoint; return whether it is gone."""
    try:
        if path.name.startswith(_REPLACED):  # or `tidy` would restore the rest of it
            path = _move_aside(path, _DELETING, disk=disk) or path
        if path.is_dir():
            disk.remove_tree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as failure:  # another user's; on NFS, an open file
        _log.warning(
            "%s is left over and cannot be removed: %s. The next save tries it again.",
            *(path, failure),
        )
        return False
    return True
