"""Stand between a launcher and one command; let nothing outlive either.

Run as a program of its own, `guard.py OPTIONS COMMAND…`, with the standard library only
(it starts in about 10 ms). It starts the command, hands on signals, and exits as the
command exits. It kills the command and all that it started, whatever their session, as
soon as

- the command has exited, or
- the lifeline, a pipe of which only the launcher holds the other end, is closed:
  the launcher ends the command, or
- the launcher is gone, even by SIGKILL.

How: the guard is a "subreaper", so orphans below it become its children and can be
found. Should the guard itself be killed, the kernel kills the command
(PR_SET_PDEATHSIG, set in a fork of this single-threaded process; in the launcher, which
has threads, that would be a race), and the launcher looks for the rest (`sweep`).

Without pidfds (macOS) there is no guard: this program becomes the command, which has to
notice the end of its launcher itself.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

KILLED_BY_LAUNCHER = 137
"""Exit code of a guard that killed for its launcher; the kernel's SIGKILL is -9."""

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that Ctrl-C, and the end of a terminal, send to all that belong to it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SWEEP_S = 10.0
_POLL_S = 0.002
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def main(arguments: list[str]) -> int:
    """Run a command until it, or the launcher, ends.

    Args:
      arguments: One JSON object of options, and the command. `lifeline` is a file
        descriptor, `launcher` a process id; `folder` is deleted if the launcher is
        gone, but for the paths of `keep`. Unless `takes_ctrl_c` is set, a Ctrl-C that
        came before this process had a session of its own is dropped.

    Returns:
      The command's exit code, negative for a signal, as in `subprocess`; 137 if the
      launcher ended it.
    """
    options, command = json.loads(arguments[0]), arguments[1:]
    if not options["takes_ctrl_c"]:
        _forget_terminal()
    if not hasattr(os, "pidfd_open"):
        os.execvp(command[0], command)
    # Before the start: no orphan may go to another parent.
    adopt_orphans()
    child = start(command)
    # What the command has as its input, a socket perhaps, ends when the command does.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    # One thread, and no lock: this process only waits for one of three events.
    code = _wait(child, options["lifeline"], options["launcher"])
    # A signal meanwhile is for a command that is gone: `forward` ignores it.
    if child.returncode is None:
        child.kill()
    sweep_children()
    # The launcher is gone, and with it whoever would delete its folder.
    if os.getppid() != options["launcher"]:
        delete(Path(options["folder"]), keep=[Path(path) for path in options["keep"]])
    return KILLED_BY_LAUNCHER if code is None else code


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own below this process (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies (Linux).

    Call it first thing in a fork of a single-threaded process: the kernel watches the
    thread that forked.
    """
    if _LIBC is not None:
        # Survives `exec`; forks of this process do not inherit it.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # It died before the line above: the kernel signals later deaths only.
        if os.getppid() != parent:
            os._exit(1)


def name_process(name: str) -> None:
    """Have this process shown under another name, of which 15 letters fit (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def start(
    command: Sequence[str | bytes],
    *,
    env: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command, which the kernel kills with this single-threaded process.

    It is handed the signals of this process; those that come meanwhile it gets
    afterwards. Among them is a Ctrl-C from before this process had a session of its
    own, if `takes_ctrl_c` is set.

    Args:
      command: Its command line.
      env: As for `subprocess.Popen`; the others likewise.
      stdin: See `env`.
      stdout: See `env`.
      stderr: See `env`.
    """
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)

    def die_with_guard() -> None:
        die_with(guard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)

    # No other thread: a function between fork and exec is safe here.
    # It inherits 0 to 2; `Popen` closes all else, the lifeline too.
    child = subprocess.Popen(
        command,
        preexec_fn=die_with_guard,
        env=env,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        # Nothing is sent once it was reaped: `send_signal` looks first.
        child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    return child


def children() -> list[int]:
    """List the children of this process, zombies included (Linux)."""
    # Unreaped children keep their ids, so no other process can be meant.
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:  # no such file here
        return []


def sweep_children() -> None:
    """Kill whatever descends from this process, until nothing does (Linux)."""
    # A bound, as a process in uninterruptible sleep does not die.
    until_s = time.monotonic() + _SWEEP_S
    while time.monotonic() < until_s:
        # Children of those that die here become this process's: the next round's.
        for pid in children():
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_POLL_S)
        except ChildProcessError:  # nothing descends from it any more
            return


def delete(folder: Path, *, keep: Collection[Path] = ()) -> None:
    """Delete a folder; if it holds any of `keep`, all but those."""
    import shutil  # slow, and rarely needed

    kept = [path for path in keep if path.is_relative_to(folder)]
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if any(each.is_relative_to(path) for each in kept):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _forget_terminal() -> None:
    """Drop what a terminal sent; the launcher has blocked its signals until here."""
    for number in TERMINAL_SIGNALS:
        # The kernel drops a waiting signal when it is ignored.
        before = signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        signal.signal(number, before)


def _wait(child: subprocess.Popen[bytes], lifeline: int, launcher: int) -> int | None:
    """Return the command's exit code; None once the launcher ends it, or is gone."""
    exited = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    # Nothing is ever written: only its end makes the pipe ready.
    poll.register(lifeline, select.POLLIN)
    # Twice, as a process that the launcher forked may hold the pipe open after it.
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(launcher), select.POLLIN)
    # If not, it died before its pidfd was opened, which is another's or none.
    if os.getppid() != launcher:
        return None
    ready = {descriptor for descriptor, _ in poll.poll()}
    # If several are ready: the code of a command that ended by itself counts.
    return child.wait() if exited in ready else None


def _exit_like(code: int) -> None:
    """End as the command did: whoever waits sees the same."""
    # No clean-up of Python's: there is nothing here that would need it.
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
