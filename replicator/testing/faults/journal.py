"""Remember over restarts which faults have happened: one JSON line for each.

A line is on the disk before its fault happens, which may be the death of the process.
"""

import contextlib
import json
import os
from pathlib import Path

from replicator.base.host.strict_json import strict_json


class Journal:
    """The faults that have happened in one process, and in those before it.

    Args:
      path: Shared by all processes of a run; None remembers as long as the process
        lives.
      rank: Whose faults.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, rank: int) -> None:
        self._path = None if path is None else Path(path)
        self._rank = rank
        self._happened = self._read()

    def has(self, number: int, fault: str) -> bool:
        """Tell whether a fault, by its place in the schedule, has happened."""
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
        # One append: lines of several processes stay whole.
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, strict_json(row).encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def _read(self) -> set[tuple[int, str]]:
        happened: set[tuple[int, str]] = set()
        if self._path is None or not self._path.exists():
            return happened
        for line in self._path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut short by a crash
                row = json.loads(line)
                if row["rank"] == self._rank:
                    happened.add((row["number"], row["fault"]))
        return happened
