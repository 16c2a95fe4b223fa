"""Remember over restarts which faults have happened, one JSON line for each.

A line is on the disk before its fault happens, which may be the death of the process.
"""

import os
from pathlib import Path

from replicator.base.host.json_lines import append_line, read_lines


class Journal:
    """The faults that have happened in one process, and in those before it.

    Args:
      path: Shared by all processes of a run; None remembers as long as the process
        lives.
      rank: Process whose faults these are.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, rank: int) -> None:
        self._path = None if path is None else Path(path)
        self._rank = rank
        self._happened = self._read()

    def has(self, number: int, fault: str) -> bool:
        """Return whether a fault, by its place in the schedule, has happened."""
        return (number, fault) in self._happened

    def note(self, number: int, fault: str) -> None:
        """Write down, durably, that a fault happens now.

        Raises:
          OSError: It cannot be written.
        """
        self._happened.add((number, fault))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        row = {"number": number, "fault": fault, "rank": self._rank}
        with open(self._path, "a+b", buffering=0) as file:
            append_line(file, row)
            os.fsync(file.fileno())

    def _read(self) -> set[tuple[int, str]]:
        rows = [] if self._path is None else read_lines(self._path)
        return {
            (row["number"], row["fault"]) for row in rows if row["rank"] == self._rank
        }
