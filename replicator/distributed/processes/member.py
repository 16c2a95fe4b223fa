"""One process of a group: its guard, its output, how it ends."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from replicator.distributed.processes.exits import count_memory_kills
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.distributed.processes.output import LabelledLines


class Member:
    """A process that was started, with all that it starts itself.

    Args:
      rank: Its number in the group.
      command: What it runs.
      environ: Its environment.
      folder: A folder of the launcher's, which the guard deletes if that is gone.
      out: Where lines of its standard output go.
      err: Where lines of its standard error go.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: Path,
        out: BinaryIO,
        err: BinaryIO,
    ) -> None:
        self.rank = rank
        self.memory_kills = count_memory_kills()
        out_from, out_to = os.pipe()
        err_from, err_to = os.pipe()
        try:
            self._process = GuardedProcess(
                command,
                owner=folder.name,
                environ=environ,
                folder=folder,
                # What the launcher hands on meanwhile must not be dropped.
                hears_terminal=True,
                stdout=out_to,
                stderr=err_to,
            )
        finally:
            for descriptor in (out_to, err_to):
                os.close(descriptor)
        self.exited = self._process.exited
        self.out = LabelledLines(out_from, f"[{rank}] ", out)
        self.err = LabelledLines(err_from, f"[{rank}] ", err)

    def tell(self, number: int) -> None:
        """Send a signal to the command, through its guard."""
        self._process.tell(number)

    def kill(self, *, hard: bool) -> None:
        """End all that descends from this process.

        Args:
          hard: Not by the guard, which sweeps best, but by the kernel: for a guard that
            does not answer.
        """
        if hard:
            self._process.kill()
        else:
            self._process.end()

    def reap(self) -> int:
        """Take the exit code of what has exited, and close everything."""
        code = self._process.close()
        for lines in (self.out, self.err):
            lines.close()
        return code
