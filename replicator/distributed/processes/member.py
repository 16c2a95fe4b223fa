"""One process of a group: its guard, its output, how it ends."""

import contextlib
import json
import os
import select
import subprocess
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
      waits: Whether it waits for `begin` (`prepared.py`); before that its end is not
        reported.
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
        waits: bool = False,
    ) -> None:
        # All attributes are set before the thread starts. None changes after that but
        # `_is_killed`, which is the driver's, and the two that `_lock` guards. It is
        # held for a moment: an end is reported by `_watch`, or `begin` finds it.
        self._lock = threading.Lock()
        self._has_begun, self._is_over = not waits, False
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
                stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
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

    def begin(self, variables: Mapping[str, str]) -> bool:
        """Have a process that waits run the command; return False if it is gone.

        Args:
          variables: What its environment lacks.
        """
        stdin = self._process.stdin
        assert stdin is not None, "only one that waits has an input"
        with self._lock:
            if self._is_over:
                return False
            self._has_begun = True
        # It is short: a pipe takes it at once. One that died just now is reported.
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(json.dumps(dict(variables)).encode() + b"\n")
        return True

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
        with self._lock:
            self._is_over = True
        if self._has_begun:
            self._report(ProcessEnd(self._rank, code, lines, out_of_memory))
