"""Owner of a TCP port of this host, where Linux reports it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def owner_of_port(port: int) -> int | None:
    """Return the id of the process that listens on a TCP port, where we may see it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    # Processes of other users are skipped: their descriptors cannot be listed.
    for process in Path("/proc").glob("[0-9]*"):
        if not sockets.isdisjoint(_open_files(process / "fd")):
            return int(process.name)
    return None


def _open_files(folder: Path) -> Iterator[str]:
    numbers: list[str] = []
    with contextlib.suppress(OSError):  # the process ended, or is another user's
        numbers = os.listdir(folder)
    for number in numbers:
        with contextlib.suppress(OSError):  # closed since, as that of the listing is
            yield os.readlink(folder / number)


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # no Linux
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                is_its = int(fields[1].rpartition(":")[2], 16) == port
                if is_its and fields[3] == _LISTENS:
                    yield fields[9]
