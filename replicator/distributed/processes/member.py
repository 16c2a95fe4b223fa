"""One process of a group: its guard, its output, how it ends."""

import os
import select
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.distributed.processes.output import LabelledLines
from replicator.distributed.processes.policy import ProcessEnd


class Member:
    """A process that was started, with all that it starts itself; a `Worker`.

    Args:
      rank: Its number in the group.
      command: Its command line.
      environ: Its environment.
      folder: A folder of the launcher's, which the guard deletes if that is gone.
      signal_asked: Returns the signal by which the group was asked to stop.
      report: Takes its end, once; called in a thread of its own.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: Path,
        signal_asked: Callable[[], int],
        report: Callable[[ProcessEnd], None],
    ) -> None:
        # All attributes are set before the thread starts. None changes after that but
        # `_is_killed`, which is the driver's.
        self._rank = rank
        self._signal_asked = signal_asked
        self._report = report
        self._is_killed = False
        out_from, out_to = os.pipe()
        err_from, err_to = os.pipe()
        try:
            self._process = GuardedProcess(
                command,
                owner=folder.name,
                environ=environ,
                folder=folder,
                # What the launcher hands on meanwhile must not be dropped.
                takes_ctrl_c=True,
                stdout=out_to,
                stderr=err_to,
            )
        finally:
            # Copies here would hide the end of the output.
            for descriptor in (out_to, err_to):
                os.close(descriptor)
        self._out = LabelledLines(out_from, f"[{rank}] ", sys.stdout.buffer)
        self._err = LabelledLines(err_from, f"[{rank}] ", sys.stderr.buffer)
        # Alone reads from the pipes, and closes them when the process has exited: that
        # ends it. A daemon, as a guard that is stuck must not keep the launcher.
        # A terminal that takes nothing holds it up, and then the process, whose pipe
        # fills: output is not dropped.
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send the command the signal that asked for the stop, through its guard."""
        self._process.send_signal(self._signal_asked())

    def kill(self) -> None:
        """End all that descends from it, by its guard, which sweeps best.

        The second time the kernel does it: the guard did not answer.
        """
        if self._is_killed:
            self._process.kill()
        self._is_killed = True
        self._process.end()

    def join(self, timeout_s: float) -> None:
        """Wait until its end is reported, but no longer than a time."""
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        poll = select.poll()
        streams = {each.descriptor: each for each in (self._out, self._err)}
        for descriptor in (self._process.exited, *streams):
            poll.register(descriptor, select.POLLIN)
        ready: set[int] = set()
        while self._process.exited not in ready:
            ready = {descriptor for descriptor, _ in poll.poll()}
            for descriptor in ready & streams.keys():
                # At its end a pipe is always ready: it is waited for no longer.
                if not streams[descriptor].pump():
                    poll.unregister(descriptor)
        # The guard has exited, so all that wrote to the pipes is dead, unless the guard
        # was killed: `close` then sweeps, and reads what the pipes still hold.
        code, out_of_memory = self._process.close(), self._process.out_of_memory
        self._out.close()
        self._err.close()
        lines = self._err.last_lines()
        self._report(ProcessEnd(self._rank, code, lines, out_of_memory))
