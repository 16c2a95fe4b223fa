"""The file system operations of a commit, one method each.

Each is announced before it happens. There a test records their order, makes one fail,
or kills the process between two of them.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import jax

from replicator.base.host.paths import sync
from replicator.base.out_of_memory import readable
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

Announce: TypeAlias = Callable[[str, Path], None]
"""`announce(operation, path)`: called before the operation; may raise."""


class Disk:
    """The file system.

    Args:
      announce: Called before each operation.

    >>> disk = Disk(lambda operation, path: print(operation, path))
    >>> disk.make_directory(Path("a"))
    make_directory a
    """

    def __init__(self, announce: Announce | None = None):
        self.announce: Announce = announce or _ignore

    def make_directory(self, path: Path) -> None:
        """Make one directory, which must not exist yet."""
        self.announce("make_directory", path)
        path.mkdir()

    def make_directories(self, path: Path) -> None:
        """Make a directory durably, with its parents, where they are missing."""
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in made:
            self.sync_directory(each.parent)

    def write_file(
        self, path: Path, data: bytes | Iterable[bytes | memoryview]
    ) -> None:
        """Write a new file, at once or in parts, and wait until it is on the disk."""
        self.announce("write_file", path)
        with path.open("xb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
        self.sync_file(path)

    def sync_file(self, path: Path) -> None:
        """Wait until the content of a file is on the disk."""
        self.announce("sync_file", path)
        sync(path)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk."""
        self.announce("sync_directory", path)
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory, atomically."""
        self.announce("rename", target)
        source.rename(target)

    def replace_file(
        self, path: Path, data: bytes | Iterable[bytes | memoryview]
    ) -> None:
        """Replace the content of a file, atomically and durably."""
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        draft.unlink(missing_ok=True)
        self.write_file(draft, data)
        # Dying before this leaves the old content, and a `.draft` that is never read.
        self.rename(draft, path)
        self.sync_directory(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and its content; a missing one is fine."""
        for file in list(walk_files(path)):
            self.announce("remove_file", file)
            file.unlink(missing_ok=True)
        for directory in list(walk_directories(path)):
            self.announce("remove_directory", directory)
            directory.rmdir()


def require_room(directory: Path, state: PyTree) -> None:
    """Raise if a state is larger than the disk of a directory, full or empty.

    Args:
      directory: Directory of checkpoints; may be absent.
      state: Arrays, or their shapes.

    Raises:
      ArgumentError: It is.

    >>> require_room(Path("."), {"w": jax.ShapeDtypeStruct((3,), "float32")})
    """
    leaves = jax.tree.leaves(state)
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        size = shutil.disk_usage(there).total
    except OSError:  # raised again by the first write there
        return
    if 0 < size < needed:  # some file systems report no size
        raise ArgumentError(
            f"`checkpoint_dir` must be on a disk with room for the state, got "
            f"{directory} on one of {readable(size)} for a state of "
            f"{readable(needed)}. Save to a larger one, or to a bucket."
        )


def walk_files(root: Path) -> Iterator[Path]:
    """List everything below `root` that is not a directory, in the order of names.

    >>> Path("b").touch()
    >>> list(walk_files(Path(".")))
    [PosixPath('b')]
    """
    for folder, folders, files in os.walk(root):
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted([*files, *links]))


def walk_directories(root: Path) -> Iterator[Path]:
    """List `root` and all directories below it, inner ones first.

    >>> Path("a").mkdir()
    >>> list(walk_directories(Path(".")))
    [PosixPath('a'), PosixPath('.')]
    """
    for folder, _, _ in os.walk(root, topdown=False):
        yield Path(folder)


def _ignore(operation: str, path: Path) -> None:
    del operation, path
