"""Find what a run has started, whoever its parent is now: by a mark it inherits."""

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "REPLICATOR_WORKER"
"""An environment variable: the run's id, a colon, the number of the worker's start."""

_SWEEP_S = 5.0
_POLL_S = 0.01


def kill_marked(run_id: str) -> None:
    """Kill all processes of this user that workers of a run have started (Linux)."""
    mark = f"{MARK}={run_id}:".encode()
    until_s = time.monotonic() + _SWEEP_S
    while time.monotonic() < until_s:
        found = [pid for pid in _processes() if _bears(pid, mark)]
        if not found:
            return
        for pid in found:
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
