"""Find all that a process has started by a mark it inherits, whatever its parent is."""

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "REPLICATOR_WORKER"
"""Environment variable: name of the owner, a colon, and anything that it adds."""

_SWEEP_S = 5.0
_POLL_S = 0.01


def kill_session(pid: int) -> None:
    """Kill the process group of a process that led a session of its own.

    Args:
      pid: Its id. It must not have been reaped: another's group may have the id then.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_marked(owner: str) -> None:
    """Kill all processes of this user that carry an owner's mark (Linux)."""
    mark = f"{MARK}={owner}:".encode()
    # Again until none is found: what is killed may have forked a moment before.
    until_s = time.monotonic() + _SWEEP_S
    while time.monotonic() < until_s:
        found = [pid for pid in _processes() if _bears(pid, mark)]
        if not found:
            return
        for pid in found:
            # Its id may be another's by now, if it ended since it was read: the kernel
            # gives ids out again only after a whole round of them.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _processes() -> list[int]:
    folder = Path("/proc")
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return [int(name) for name in names if name.isdecimal()]


def _bears(pid: int, mark: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # somebody else's, or gone
        return False
    return any(each.startswith(mark) for each in environment.split(b"\0"))
