"""Kill launchers of programs by SIGKILL; count what is left of them 2 s later.

Half of the rounds kill once all nodes run, each with a child of its own; the others
while the program starts, at a moment that is drawn. What a round has started is known
by a variable in its environment, which all that descends from it inherits.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from benchmarks.runs.doomed_script import NODES

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Launchers to kill, of each kind.")
_LAUNCHERS = flags.DEFINE_multi_string("launchers", ["processes", "ray"], "Kinds.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")

_MARK = "REPLICATOR_BENCHMARK_ROUND"
_LEFT_AFTER_S = 2.0
_READY_S = 120.0
_POLL_S = 0.01
# How long a launch takes on a quiet machine, and somewhat more.
_LAUNCH_S = {"processes": 1.5, "ray": 10.0}


def kill_one(launcher: str, delay_s: float | None) -> list[str]:
    """Start a launcher and kill it; return the commands of what is left.

    Args:
      launcher: Its kind.
      delay_s: How long after the launch began; None: once all nodes run.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="orphans-") as folder:
        script = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.runs.doomed_script", launcher, folder],
            env={"JAX_PLATFORMS": "cpu", **os.environ, _MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_until(lambda: (Path(folder) / "launching").exists(), script)
            if delay_s is None:
                _wait_until(lambda: len(_ready(folder)) == NODES, script)
            else:
                time.sleep(delay_s)
        finally:
            script.kill()
            script.wait()
        time.sleep(_LEFT_AFTER_S)
        left = _marked(mark)
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    return [command for _, command in left]


def _ready(folder: str) -> list[Path]:
    return list(Path(folder).glob("node-*"))


def _wait_until(condition: Callable[[], bool], script: subprocess.Popen) -> None:
    until_s = time.monotonic() + _READY_S
    while not condition():
        if script.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"The script did not come so far ({script.poll()}).")
        time.sleep(_POLL_S)


def _marked(mark: str) -> list[tuple[int, str]]:
    """Return the living processes of a round: id and command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environment = (entry / "environ").read_bytes()
                if state not in "ZX" and f"{_MARK}={mark}".encode() in environment:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append((int(entry.name), command.decode()[:100]))
    return found


def main(argv: list[str]) -> None:
    del argv
    rng = random.Random(_SEED.value)
    left = 0
    for launcher in _LAUNCHERS.value:
        for number in range(_ROUNDS.value):
            starts = number % 2 == 1
            delay_s = rng.uniform(0.0, _LAUNCH_S[launcher]) if starts else None
            found = kill_one(launcher, delay_s)
            left += len(found)
            when = (
                f"{delay_s:.2f} s into its start" if delay_s is not None else "running"
            )
            print(f"{launcher} {number}, {when}: {len(found)} left {found}", flush=True)
    rounds = _ROUNDS.value * len(_LAUNCHERS.value)
    print(json.dumps({"left": left, "rounds": rounds}))


if __name__ == "__main__":
    app.run(main)
