"""Serve what is fuzzed, in a process of its own: `python -m ... SEED`.

The address is the line it writes. It has the same values as its attacker, by the seed,
and so knows one that is not what was sent.
"""

import gc
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.rpc.processes import wait_until_let_go
from benchmarks.rpc_fuzz.values import REGISTRY, RandomValues, is_same
from replicator.base.types import PyTree
from replicator.rpc.codec.codec import encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.server.server import Server
from replicator.rpc.transports.frames import CHECKED_BODY_BYTES

LIMITS = MessageLimits(
    message_bytes=1 << 20,
    head_bytes=1 << 16,
    leaves=4096,
    in_flight_bytes=1 << 22,
    in_flight_calls=64,
)
POOL_SIZE = 4
_ORIGINALS = 200
_CHECKED_BYTES = CHECKED_BODY_BYTES - 1000  # there is space between arrays


def original_values(seed: int) -> Sequence[PyTree]:
    """Return what is sent, as both ends know it; a checksum covers all of each."""
    values = RandomValues(seed)
    several = [np.arange(1500.0), np.ones(9), bytes(range(250)) * 10]
    drawn = [several, *(values.value(depth=3) for _ in range(_ORIGINALS))]
    sizes = [encode(value, registry=REGISTRY).num_bytes for value in drawn]
    return [v for v, size in zip(drawn, sizes, strict=True) if size < _CHECKED_BYTES]


class Target:
    """Service that the attacker and the good client call."""

    def __init__(self, seed: int) -> None:
        self._originals = original_values(seed)
        self._wrong = 0
        self._taken = 0
        self._modules: set[str] | None = None

    def deposit(self, index: int, value: PyTree) -> None:
        """Take a value that must be the one both know."""
        self._taken += 1
        if not is_same(self._originals[index], value):
            self._wrong += 1
            print(f"wrong: {index} {value!r:.500}", file=sys.stderr)

    def take(self, *values: PyTree, **more: PyTree) -> int:
        """Take any values."""
        return len(values) + len(more)

    def echo(self, value: PyTree) -> PyTree:
        """Return what came."""
        return value

    def report(self) -> dict[str, PyTree]:
        """Return resources of this process, and its imports since the first call."""
        gc.collect()
        modules = set(sys.modules)
        first = self._modules = self._modules or modules
        proc = Path("/proc/self")
        pages = int((proc / "statm").read_text().split()[1]) if proc.exists() else 0
        return {
            "wrong": self._wrong,
            "taken": self._taken,
            "modules": sorted(modules - first),
            "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir(proc / "fd")) if proc.exists() else 0,
        }


def main(seed: str) -> None:
    logging.getLogger("replicator").setLevel(logging.CRITICAL)  # it names each peer
    server = Server(
        Target(int(seed)),
        name="target",
        address="unix:",
        pool_size=POOL_SIZE,
        registry=REGISTRY,
        limits=LIMITS,
    )
    with server:
        print(server.address, flush=True)
        wait_until_let_go()


if __name__ == "__main__":
    main(*sys.argv[1:])
