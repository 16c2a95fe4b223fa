"""Write a checkpoint beside the others, make it durable, and only then give it a name.

The order of writes is: content of files, names in directories, the new name, the name
in its parent. A crash leaves a directory that starts with a dot: either one that is not
a checkpoint and that the next owner removes, or a former checkpoint that gets its name
back. After `commit` returned, power may fail.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from replicator.checkpoint.checksums import record_file
from replicator.checkpoint.disk import Disk, walk_directories, walk_files
from replicator.checkpoint.group import Piece, fill_in
from replicator.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    Manifest,
    encode,
)
from replicator.checkpoint.orbax_files import write_arrays
from replicator.checkpoint.snapshot import Draft

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
    generation: int,
    disk: Disk,
    require_current: Callable[[], None],
    pieces: tuple[Piece, ...] = (),
) -> Manifest:
    """Write a checkpoint; return when it is whole and durable.

    Args:
      draft: Draft to save.
      directory: Directory of all checkpoints.
      generation: Generation of the owner of the directory.
      disk: The file system.
      require_current: Raises if there is a newer owner; called first and last.
      pieces: Pieces that other processes have written for it; removed at the end.

    Returns:
      The manifest of the checkpoint.

    Raises:
      OSError: The file system failed; nothing is left of the attempt.
      CheckpointInUseError: From `require_current`.
    """
    others = {each.path.parent for each in pieces}
    require_current()
    # A failed save may have left files: threads of orbax may have gone on writing.
    tidy(directory, disk=disk, but=others)
    # A random name: a writer that was replaced removes nothing of the new one's.
    writing = directory / f"{_WRITING}{draft.step}-{os.urandom(4).hex()}"
    disk.make_directory(writing)
    try:
        manifest = _write(
            draft, writing, generation=generation, disk=disk, pieces=pieces
        )
        require_current()
        # A new owner between these two is not noticed: only `flock` prevents that.
        _give_name(writing, checkpoint_path(directory, draft.step), disk=disk)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove_tree(writing)
        raise
    finally:
        for folder in others:
            _remove(folder, disk=disk)
    return manifest


def delete(directory: Path, step: int, *, disk: Disk) -> None:
    """Delete a checkpoint; it is renamed first, so that a part is never read as one."""
    aside = _move_aside(checkpoint_path(directory, step), _DELETING, disk=disk)
    if aside is not None:
        _remove(aside, disk=disk)


def set_damaged_aside(directory: Path, step: int, *, disk: Disk) -> Path | None:
    """Rename a damaged checkpoint, so that it is not used, and keep it to inspect."""
    return _move_aside(checkpoint_path(directory, step), _DAMAGED, disk=disk)


def tidy(directory: Path, *, disk: Disk, but: Collection[Path] = ()) -> list[str]:
    """Remove leftovers of owners that died while writing or deleting; return names.

    A checkpoint that was moved aside for a new one that was never finished gets its
    name back. A leftover that cannot be removed is logged, and tried again next time.
    """
    done: list[str] = []
    for path in sorted({*directory.iterdir()}.difference(but)):
        name = path.name
        checkpoint = directory / name.removeprefix(_REPLACED)[:_DIGITS]
        if name.startswith(_REPLACED) and not checkpoint.exists():
            disk.rename(path, checkpoint)
            disk.sync_directory(directory)
            done.append(name)
        elif name.startswith(_LEFTOVERS) or path.suffix == ".draft":
            done += [name] if _remove(path, disk=disk) else []
    return done


def _write(
    draft: Draft,
    writing: Path,
    *,
    generation: int,
    disk: Disk,
    pieces: tuple[Piece, ...],
) -> Manifest:
    state = writing / STATE_NAME
    disk.announce("write_arrays", state)
    arrays = [fetch() for fetch in draft.fetches]
    fill_in(arrays, pieces)
    write_arrays(state, draft.leaves, arrays)
    files = []
    for path in walk_files(state):
        files.append(record_file(path, root=writing))
        disk.sync_file(path)
    manifest = Manifest(
        step=draft.step,
        generation=generation,
        meta=draft.meta | (draft.late() if draft.late is not None else {}),
        metrics=draft.metrics,
        num_devices=draft.num_devices,
        leaves=draft.leaves,
        files=tuple(files),
    )
    disk.write_file(writing / MANIFEST_NAME, encode(manifest))
    for folder in walk_directories(writing):
        disk.sync_directory(folder)
    return manifest


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
