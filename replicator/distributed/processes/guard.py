"""Stand between a launcher and one process of a group; let nothing outlive either.

Run as a program of its own, `guard.py LIFELINE LAUNCHER FOLDER COMMAND…`, with the
standard library only (it starts in about 30 ms). It starts the command, hands on
signals, and exits as the command exits. It kills the command and all that it started,
whatever their session, as soon as

- the command has exited, or
- the lifeline, a pipe of which only the launcher holds the other end, is closed:
  because the launcher wants it so, or because it is gone, even by SIGKILL.

How: the guard is a "subreaper", so orphans below it become its children and can be
found. Should the guard itself be killed, the kernel kills the command
(PR_SET_PDEATHSIG, set in a fork of this single-threaded process; in the launcher, which
has threads, that would be a race).
"""

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

KILLED_BY_LAUNCHER = 137
"""What a guard exits with that was told to kill; the kernel's own SIGKILL is -9."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SWEEP_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(words: list[str]) -> int:
    """Run a command until it, or the launcher, ends.

    Args:
      words: The lifeline's file descriptor, the launcher's process id, a folder to
        delete if the launcher is gone, and the command.

    Returns:
      The command's exit code, negative for a signal, as in `subprocess`; 137 if the
      launcher ended it.
    """
    lifeline, launcher = int(words[0]), int(words[1])
    folder, command = words[2], words[3:]
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(command)
    code = _wait(child, lifeline)
    _sweep(child)
    if code is None:
        if os.getppid() != launcher:
            shutil.rmtree(folder, ignore_errors=True)
        return KILLED_BY_LAUNCHER
    return code


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start the command; what signals come meanwhile, it gets afterwards.

    So it does with a Ctrl-C from before this process had a session of its own: who
    starts it blocks that (`replicator.distributed.processes.own_session`).
    """
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)

    def die_with_guard() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)

    # No other thread: a function between fork and exec is safe here.
    # It inherits 0 to 2; `Popen` closes all else, the lifeline too.
    child = subprocess.Popen(command, preexec_fn=die_with_guard)

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        # Nothing is sent once it was reaped: `send_signal` looks first.
        child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    return child


def _wait(child: subprocess.Popen[bytes], lifeline: int) -> int | None:
    """Return the command's exit code; None once the lifeline is closed."""
    exited = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    # Nothing is ever written: only its end makes the pipe ready.
    poll.register(lifeline, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    # If both are ready: a command that ended by itself tells its own code.
    return child.wait() if exited in ready else None


def _sweep(child: subprocess.Popen[bytes]) -> None:
    """Kill whatever descends from this process, until nothing does."""
    until_s = time.monotonic() + _SWEEP_S
    if child.returncode is None:
        child.kill()
    while time.monotonic() < until_s:
        for pid in _children():
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
        except ChildProcessError:
            return


def _children() -> list[int]:
    # Unreaped children keep their ids, so no other process can be meant.
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


def _exit_like(code: int) -> None:
    """End as the command did: whoever waits sees the same."""
    if code >= 0:
        os._exit(code)
    # The command has left its core already, if it was to leave one.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


if __name__ == "__main__":
    _exit_like(main(sys.argv[1:]))
