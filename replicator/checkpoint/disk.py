"""The operations on a file system that a commit is made of, one at a time.

Each is announced before it happens. That is the seam at which a test records their
order, makes one fail, or kills the process between two of them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from replicator.base.host.paths import sync

Announce: TypeAlias = Callable[[str, Path], None]
"""`announce(operation, path)`: called before the operation; may raise."""


class Disk:
    """The file system.

    Args:
      announce: Learns of each operation before it happens.
    """

    def __init__(self, announce: Announce | None = None):
        self.announce: Announce = announce or _say_nothing

    def make_directory(self, path: Path) -> None:
        """Make one directory, which must not exist."""
        self.announce("make_directory", path)
        path.mkdir()

    def write_file(self, path: Path, data: bytes | Iterable[bytes]) -> None:
        """Write a new file, at once or in parts; return when it is on the disk."""
        self.announce("write_file", path)
        with path.open("xb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
        self.sync_file(path)

    def sync_file(self, path: Path) -> None:
        """Return when the content of a file is on the disk."""
        self.announce("sync_file", path)
        sync(path)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the disk."""
        self.announce("sync_directory", path)
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, which happens whole or not at all."""
        self.announce("rename", target)
        source.rename(target)

    def replace_file(self, path: Path, data: bytes) -> None:
        """Give a file new content, whole or not at all, and durable."""
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        draft.unlink(missing_ok=True)
        self.write_file(draft, data)
        # Dying before this leaves the old content, and a `.draft` that nobody reads.
        self.rename(draft, path)
        self.sync_directory(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with all that is in it; one that is gone is fine."""
        for file in list(walk_files(path)):
            self.announce("remove_file", file)
            file.unlink(missing_ok=True)
        for directory in list(walk_directories(path)):
            self.announce("remove_directory", directory)
            directory.rmdir()


def walk_files(root: Path) -> Iterator[Path]:
    """List everything below `root` that is no directory, in the order of names."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted([*files, *links]))


def walk_directories(root: Path) -> Iterator[Path]:
    """List `root` and all directories below it, inner ones first."""
    for folder, _, _ in os.walk(root, topdown=False):
        yield Path(folder)


def _say_nothing(operation: str, path: Path) -> None:
    del operation, path
