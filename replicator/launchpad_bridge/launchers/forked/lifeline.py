"""Stand between a launcher and its fork server; let nothing outlive either.

Run as a program of its own, with the standard library only until it has forked:

    launcher ── lifeline.py, the guard ── the fork server ── workers ── what they start

The guard kills all that is below it, whatever its session, as soon as

- the fork server has exited, or
- the lifeline, a pipe of which only the launcher holds the other end, is closed:
  because the launcher wants it so, or because it is gone, even by SIGKILL.

How: the guard is a "subreaper", so orphans below it become its children and can be
found. Should the guard itself be killed, the kernel kills the fork server, and with it
the workers (PR_SET_PDEATHSIG, set in forks of single-threaded processes; in the
launcher, which has threads, that would be a race). For a command
`replicator.distributed.processes.guard` does the same; this one has to hand on a socket
and memory, so it forks.

Without pidfds (macOS) there is no guard: the fork server watches the lifeline itself.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_S = 10.0
# Of `run_folder` and `remote_worker`, which this program cannot import.
_STAYS = ("launcher.lock", "made-by-worker")
_POLL_S = 0.002
_HAS_GUARD = hasattr(os, "pidfd_open")
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def main(words: list[str]) -> int:
    """Fork; be the fork server in the child, its guard in the parent.

    Args:
      words: One JSON object: `lifeline`, a file descriptor; `launcher`, a process id;
        `folder`, deleted but for `keep` if the launcher is gone; `path`, for imports;
        `server`, the module of the fork server.

    Returns:
      0 once nothing is left.
    """
    _forget_terminal()
    told = json.loads(words[0])
    if not _HAS_GUARD:
        return _be_fork_server(told)
    adopt_orphans()
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        die_with(guard)
        os.close(told["lifeline"])
        return _be_fork_server(told)
    # Only the fork server speaks with the launcher.
    # So the socket ends when that one dies, though the guard lives on.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    return _guard(server, told)


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
        # It died before the line above: the kernel tells of later deaths only.
        if os.getppid() != parent:
            os._exit(1)


def name_process(name: str) -> None:
    """Have this process shown under another name, of which 15 letters fit (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def children() -> list[int]:
    """List the children of this process, zombies included (Linux)."""
    # Unreaped children keep their ids, so no other process can be meant.
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:  # no such file here
        return []


def _forget_terminal() -> None:
    """Drop a Ctrl-C that came before this process had a session of its own.

    Who starts it blocks these signals until here
    (`replicator.distributed.processes.own_session`).
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        before = signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        signal.signal(number, before)


def _be_fork_server(told: dict) -> int:
    sys.path[:] = told["path"]
    gc.disable()  # imports are faster; `preload` puts it on again
    # By name, as it stands above this file, and the guard needs nothing of it.
    return importlib.import_module(told["server"]).main(control=0)


def _guard(server: int, told: dict) -> int:
    lifeline, launcher = told["lifeline"], told["launcher"]

    def cut(number: int, frame: FrameType | None) -> NoReturn:
        _handle(signal.SIG_IGN)  # a second one, as systemd sends, would end the guard
        raise KeyboardInterrupt

    _handle(cut)
    with contextlib.suppress(KeyboardInterrupt):
        _wait(server, lifeline, launcher)
    _handle(signal.SIG_IGN)
    # None of these interrupts it. If the guard is killed here, the launcher's
    # `kill_marked` finds what is left.
    kill_until_none(children)
    if os.getppid() != launcher:
        delete(Path(told["folder"]), keep=Path(told["keep"]))
    return 0


def _handle(handler: Callable[..., Any] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def _wait(server: int, lifeline: int, launcher: int) -> None:
    """Return once the fork server has exited or the launcher is gone."""
    poll = select.poll()
    # Nothing is ever written to the lifeline: only its end makes the pipe ready.
    for descriptor in (os.pidfd_open(server), lifeline):
        poll.register(descriptor, select.POLLIN)
    # Twice, as a process that the launcher forked may hold the pipe open after it.
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(launcher), select.POLLIN)
    # If not, it died before its pidfd was opened, which is another's or none.
    if os.getppid() == launcher:
        poll.poll()


def kill_until_none(find: Callable[[], list[int]]) -> None:
    """Kill the children that `find` lists, until there are none."""
    until_s = time.monotonic() + _SWEEP_S
    while time.monotonic() < until_s:
        for pid in find():
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_POLL_S)
        except ChildProcessError:
            return


def delete(folder: Path, *, keep: Path) -> None:
    """Delete a folder; if `keep` lies in it, all but that.

    By `_STAYS` the next launch, or the next worker, knows that the rest may go.
    """
    import shutil  # slow, and rarely needed

    if not keep.is_relative_to(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name in _STAYS or keep.is_relative_to(path):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
