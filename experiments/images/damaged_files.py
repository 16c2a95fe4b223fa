"""Damaged files of a run: each is named, all are counted, too many end the run.

The names stand in one file, a line for each, to which all threads and processes that
decode append.
"""

import os
import sys
from pathlib import Path

from replicator.base.host.json_lines import append_line, read_lines
from replicator.errors import ArgumentError


class DamagedFiles:
    """Names of damaged files, which the processes of one run share.

    Args:
      path: File that holds the names; it is made with the first.
      allowed: Number of damaged files that a run may leave out.
    """

    def __init__(self, path: str | os.PathLike[str], *, allowed: int) -> None:
        self._path, self._allowed = Path(path), allowed

    def names(self) -> list[str]:
        """Return the names, without repetition, in the order in which they came."""
        return list(dict.fromkeys(line["file"] for line in read_lines(self._path)))

    def add(self, name: str, reason: str) -> None:
        """Note that a file cannot be decoded.

        Args:
          name: Of the file.
          reason: Why not.

        Raises:
          ArgumentError: There are more than are allowed.
          OSError: The name cannot be written.
        """
        known = self.names()
        if name in known:
            return
        count = len(known) + 1
        if count > self._allowed:
            raise ArgumentError(
                f"`--skip_damaged` must be at least {count}, the number of damaged "
                f"JPEGs so far, got {self._allowed}; the last is {name} ({reason}). "
                "Mend or delete it, or allow more."
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b", buffering=0) as file:
            append_line(file, {"file": name, "reason": reason})
        print(f"damaged, left out: {name} ({reason})", file=sys.stderr, flush=True)
