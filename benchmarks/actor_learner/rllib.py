"""RLlib, in a virtual environment of its own, as a child that trains when told to.

It wants other versions of packages than this repository, and PyTorch. The environment
is made where there is none: some 2 GB, and two minutes.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.actor_learner.setup import Setup
from benchmarks.peer_venv import peer_python
from benchmarks.rpc.processes import Child

_PACKAGES = ("ray[rllib]==2.60.*", "torch==2.13.0", "ale-py>=0.12")
_READY_S = 300.0


def environment(folder: Path) -> Path | None:
    """Return the Python that has RLlib; None, and a warning: it cannot be installed."""
    return peer_python(folder, _PACKAGES)


class Peer:
    """RLlib that learns; made by `rllib_peer`."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def trained_per_s(self, seconds: float) -> float:
        """Train so long; return environment steps a second that were learnt from."""
        self._child.tell(str(seconds))
        found = json.loads(self._child.read_line(timeout_s=seconds + _READY_S))
        return found["trained"] / found["seconds"]


@contextlib.contextmanager
def rllib_peer(python: Path, setup: Setup) -> Iterator[Peer]:
    """Start it; it is compiled, warm and idle. It ends with the block."""
    command = [str(python), "-m", "benchmarks.actor_learner.rllib_peer"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, json.dumps(dataclasses.asdict(setup))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"},
    ) as process:
        child = Child(process)
        try:
            while child.read_line(timeout_s=_READY_S) != "ready":
                pass  # Ray writes here, too
            yield Peer(child)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
