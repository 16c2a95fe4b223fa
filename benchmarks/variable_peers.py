"""Be the learner, or one of the actors, of `variable_service`, in a process of its own.

`python -m benchmarks.variable_peers learner` writes its address.
`python -m benchmarks.variable_peers actor ADDRESS` writes `ready`, reads lines of a
method, a number of pulls, and whether to copy what came, and answers each with the
processor time that it took.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.rpc.processes import wait_until_let_go
from replicator.launchpad_bridge.learner.published import PublishedVariables, Variables
from replicator.rpc.client.client import Client
from replicator.rpc.server.server import Server

ACTORS = 16
ARRAYS = 20
BYTES = 4 << 20


class Learner:
    """Publishes a new version after as many pulls as there are actors."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        size = BYTES // ARRAYS // 4
        self._values = {f"w{i}": rng.random(size, np.float32) for i in range(ARRAYS)}
        self._published = PublishedVariables()
        self._published.publish(0, {"policy": self._values})
        self._lock = threading.Lock()
        self._pulls = 0

    def pull_encoded(self) -> Variables | None:
        """Return the newest variables, encoded once per version."""
        self._count()
        return self._published.get()

    def pull_plain(self) -> Variables:
        """Return the newest variables, encoded for each actor."""
        version = self._count()
        return Variables(version=version, values={"policy": self._values})

    def processor_s(self) -> float:
        """Return the processor time of this process."""
        return time.process_time()

    def _count(self) -> int:
        with self._lock:
            self._pulls += 1
            version, others = divmod(self._pulls, ACTORS)
            if not others:
                self._published.publish(version, {"policy": self._values})
            return version


def serve() -> None:
    with tempfile.TemporaryDirectory(prefix="variables-") as folder:
        address = f"unix:{Path(folder) / 'socket'}"
        with Server(Learner(), name="learner", address=address) as server:
            print(server.address, flush=True)
            wait_until_let_go()


def act(address: str) -> None:
    own = np.empty(BYTES // ARRAYS // 4, np.float32)
    with Client(address) as learner:
        learner.pull_encoded()
        print("ready", flush=True)
        for line in sys.stdin:
            method, pulls, copies = line.split()
            started_s = time.process_time()
            for _ in range(int(pulls)):
                found = getattr(learner, method)()
                if int(copies):  # as putting them on a device does
                    for array in found.values["policy"].values():
                        np.copyto(own, array)
                del found
            print(time.process_time() - started_s, flush=True)


if __name__ == "__main__":
    {"learner": serve, "actor": act}[sys.argv[1]](*sys.argv[2:])
