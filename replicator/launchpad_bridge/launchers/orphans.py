"""Find what a run has started, whoever its parent is now: by a mark that is inherited.

Also a program of its own, with the standard library only: `orphans.py LIFELINE RUN_ID`
waits until the launcher is gone, or wants it so, and kills what bears the mark. For
processes that others start for us, and that therefore no guard of ours is above.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "REPLICATOR_WORKER"
"""An environment variable: the run's id, a colon, the number of the worker's start."""

_SWEEP_S = 5.0
_POLL_S = 0.01


class Sweeper:
    """A process that ends what a run has started, when this one is gone or says so.

    Args:
      run_id: Of the run.
    """

    def __init__(self, run_id: str) -> None:
        reading, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -I -S: it needs nothing of the environment, and starts at once.
                [sys.executable, "-I", "-S", __file__, str(reading), run_id],
                pass_fds=(reading,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def close(self) -> None:
        """Have it done now."""
        os.close(self._lifeline)
        self._process.wait(2 * _SWEEP_S)


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


def _main(lifeline: str, run_id: str) -> None:
    # Nothing is ever written: it ends with the launcher.
    os.read(int(lifeline), 1)
    kill_marked(run_id)


if __name__ == "__main__":
    _main(*sys.argv[1:])
