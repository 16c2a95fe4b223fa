"""Start a command under a guard, and end it with all that it has started.

A terminal's Ctrl-C does not reach it, from its first instant on. A new session alone
leaves a gap: a fork belongs to the terminal until it has called `setsid`, and a Ctrl-C
within these microseconds kills it. So a terminal's signals are blocked while the guard
starts, which inherits that: one that came in the gap waits until the guard drops it or
hands it on.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from replicator.distributed.processes import guard
from replicator.distributed.processes.exits import count_memory_kills
from replicator.distributed.processes.sweep import MARK, kill_marked, kill_session

# Longer than a guard sweeps (`guard._SWEEP_S`).
_END_S = 12.0
_KILL_S = 5.0


class GuardedProcess:
    """A command that runs; nothing that it starts outlives it, or this process.

    Its guard sees to that. Where the guard is killed by SIGKILL, this process ends what
    it finds: not what has left the session and dropped the mark in its environment.
    Where both are, the command dies, and what it started in other sessions goes on.

    Args:
      command: What to run.
      owner: Name in the mark by which all that descends from it is found.
      environ: Its environment.
      folder: Deleted by the guard if this process is gone.
      keep: What stays in it.
      takes_ctrl_c: Whether a Ctrl-C that came before the command had a session of its
        own is handed to it, or dropped.
      stdin: As for `subprocess.Popen`; `stdout` and `stderr` likewise.
      stdout: See `stdin`.
      stderr: See `stdin`.

    Attributes:
      exited: Ready to be read once the guard has exited; -1 without pidfds.
      pid: The guard's process id.
      stdin: The command's input, if that is a pipe; whoever uses it closes it.
      stdout: The command's output, if that is a pipe.

    Raises:
      OSError: It cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        owner: str,
        environ: Mapping[str, str],
        folder: Path,
        keep: Iterable[Path] = (),
        takes_ctrl_c: bool = False,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
    ) -> None:
        # Counted by the kernel for the whole machine: not only this process's.
        self._memory_kills = count_memory_kills()
        # Unlike that of all else of the same owner: only this one's are swept.
        self._mark = f"{owner}.{secrets.token_hex(4)}"
        # Our end closes on `exec`: no other process started from here keeps it open.
        guarded, lifeline = os.pipe()
        # A file, as two threads may close it: only one of them does.
        self._lifeline = open(lifeline, "wb", buffering=0)  # noqa: SIM115
        options = {
            "lifeline": guarded,
            "launcher": os.getpid(),
            "folder": str(folder),
            "keep": [str(path) for path in keep],
            "takes_ctrl_c": takes_ctrl_c,
        }
        # -I -S: the guard needs nothing of the environment, and starts at once.
        program = [sys.executable, "-I", "-S", guard.__file__, json.dumps(options)]
        try:
            with _terminal_signals_blocked():
                self._guard = subprocess.Popen(
                    [*program, *command],
                    bufsize=0,
                    env={**environ, MARK: f"{self._mark}:"},
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(guarded,),
                    # The terminal's Ctrl-C is for the launcher.
                    start_new_session=True,
                )
        except BaseException:
            self.end()
            raise
        finally:
            os.close(guarded)
        self.pid = self._guard.pid
        self.stdin: IO[bytes] | None = self._guard.stdin
        self.stdout: IO[bytes] | None = self._guard.stdout
        has_pidfds = hasattr(os, "pidfd_open")
        self.exited = os.pidfd_open(self._guard.pid) if has_pidfds else -1
        # A file, as the lifeline is one.
        self._exited = open(self.exited, "rb", buffering=0) if has_pidfds else None  # noqa: SIM115

    @property
    def out_of_memory(self) -> bool:
        """True if the kernel has killed a process for memory since the start."""
        return count_memory_kills() > self._memory_kills

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, through its guard."""
        if self.exited < 0:
            self._guard.send_signal(number)
            return
        # `Popen` would look first whether it has exited, and so give back its id.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exited, number)

    def end(self) -> None:
        """Have the guard end all; returns at once."""
        # The guard polls the other end. If this process dies, that ends as well.
        self._lifeline.close()

    def kill(self) -> None:
        """Have the kernel end what it can, for a guard that does not answer."""
        # Not reaped yet, so the id is the guard's, and the session, too. Another thread
        # may reap it in this instant; the kernel gives no id out again that soon.
        if self._guard.returncode is None:
            kill_session(self._guard.pid)

    def wait(self) -> int:
        """Wait until the command has ended; return its exit code."""
        # Without a bound: a command may run for months. `end` and `kill` end it.
        self._wait_exit(None)
        return self.close()

    def close(self, timeout_s: float = _END_S) -> int:
        """End what still runs; may be called twice, also at the same time.

        Args:
          timeout_s: How long the guard may take before the kernel has to do it.

        Returns:
          The command's exit code; 137 if this ended it.
        """
        # Two threads may pass here at once. All that follows may be done twice: files
        # close once, and `Popen.wait` has a lock of its own.
        if self._guard.returncode is not None:
            return self._guard.returncode
        self.end()
        self._wait_exit(timeout_s)
        # Before its id is given back. Only a guard that was killed itself, or is stuck,
        # leaves something in its session.
        self.kill()
        code = self._guard.wait(_KILL_S)
        if self._exited is not None:
            self._exited.close()
        if self.stdout is not None:
            self.stdout.close()
        if code < 0:
            # So may it end which was killed itself: what hides has to be found.
            kill_marked(self._mark)
        return code

    def _wait_exit(self, timeout_s: float | None) -> None:
        if self.exited < 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout_s)
            return
        poll = select.poll()  # `select` knows no descriptors past 1,023
        poll.register(self.exited, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1e3)


@contextlib.contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, guard.TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
