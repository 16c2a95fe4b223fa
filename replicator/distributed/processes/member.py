"""One process of a group: its guard, its output, how it ends."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from replicator.distributed.processes import guard
from replicator.distributed.processes.memory_kills import count_memory_kills
from replicator.distributed.processes.output import LabelledLines
from replicator.distributed.processes.own_session import terminal_signals_blocked


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
        # -I -S: the guard needs nothing of the environment, and starts at once.
        program = [sys.executable, "-I", "-S", guard.__file__]
        # Our end closes on `exec`: no other member's guard keeps this lifeline open.
        guarded, self._lifeline = os.pipe()
        out_from, out_to = os.pipe()
        err_from, err_to = os.pipe()
        try:
            with terminal_signals_blocked():
                self._process = subprocess.Popen(
                    [*program, str(guarded), str(os.getpid()), str(folder), *command],
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out_to,
                    stderr=err_to,
                    pass_fds=(guarded,),
                    # The terminal's Ctrl-C is for the launcher, which hands it on.
                    start_new_session=True,
                )
        finally:
            for descriptor in (guarded, out_to, err_to):
                os.close(descriptor)
        self.exited = os.pidfd_open(self._process.pid)
        self.out = LabelledLines(out_from, f"[{rank}] ", out)
        self.err = LabelledLines(err_from, f"[{rank}] ", err)

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def tell(self, number: int) -> None:
        """Send a signal to the command, through its guard."""
        self._process.send_signal(number)

    def kill(self, *, hard: bool) -> None:
        """End all that descends from this process.

        Args:
          hard: Not by the guard, which sweeps best, but by the kernel: for a guard that
            does not answer.
        """
        if hard:
            self._kill_session()
        elif self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def reap(self) -> int:
        """Take the exit code of what has exited, and close everything."""
        # Before its id is given back: nobody else's group can bear it yet.
        self._kill_session()
        code = self._process.wait()
        self.kill(hard=False)
        for lines in (self.out, self.err):
            lines.close()
        os.close(self.exited)
        return code

    def _kill_session(self) -> None:
        # Only a guard that was killed itself leaves something in its session.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
