"""Run programs of Launchpad as a user does, in a process of their own."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMPAT = "replicator.launchpad_bridge.compat"
LIMIT_S = 300.0


def run(words, *, folder, path=()):
    """Run `python -m compat words`; return its status, and what it printed.

    Args:
      words: Of the command line.
      folder: Where it runs.
      path: Further places where modules are looked for.
    """
    # Logs of runs are kept; those of tests go with this folder.
    with tempfile.TemporaryDirectory(prefix="lp") as kept:
        process = subprocess.Popen(
            [sys.executable, "-m", COMPAT, *map(str, words)],
            cwd=folder,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)]),
                "TMPDIR": kept,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, out
