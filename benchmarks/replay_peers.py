"""Serve a replay table of Atari frames, or insert into it: a process of `replay`.

`python -m benchmarks.replay_peers table CAPACITY` fills one, and writes its address.
`python -m benchmarks.replay_peers actor ADDRESS` inserts while its input says `go`.
"""

import sys
import threading
import time
from typing import Any

import numpy as np

import replicator.launchpad_bridge as lp
from benchmarks.rpc.processes import wait_until_let_go
from replicator.rpc.client.client import Client
from replicator.rpc.server.server import Server

FRAME = (84, 84, 4)
BATCH = 256
ACTORS = 4
_INSERT = 8  # rows at once, of an actor
_FRAMES_PER_S = 800  # at most, of one, as an emulator makes them
_FILL = 500


def atari_table(capacity: int, **options: Any) -> lp.ReplayTable:
    """Return a full table of frames of noise."""
    options = {"sampler": lp.prioritised(0.6), "finite": ()} | options
    table = lp.ReplayTable(capacity, **options)
    random = np.random.default_rng(0)
    frames = random.integers(0, 255, (_FILL, *FRAME), np.uint8)
    for first in range(0, capacity, _FILL):
        count = min(_FILL, capacity - first)
        table.insert(
            {"frames": frames[:count]},
            actor="actor/0",
            version=0,
            priorities=random.random(count) + 0.1,
        )
    return table


def serve(capacity: str) -> None:
    table = atari_table(int(capacity))
    with Server(table, name="table", address="unix:", pool_size=64) as server:
        print(server.address, flush=True)
        wait_until_let_go()


def insert(address: str) -> None:
    frames = np.zeros((_INSERT, *FRAME), np.uint8)
    goes = threading.Event()

    def run(table: Client) -> None:
        while goes.wait():
            table.insert({"frames": frames}, actor="actor/1", version=0)
            time.sleep(_INSERT / _FRAMES_PER_S)

    with Client(address) as table:
        thread = threading.Thread(target=run, args=[table], daemon=True)
        thread.start()
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "go":
                goes.set()
            else:
                goes.clear()
            print("done", flush=True)


if __name__ == "__main__":
    {"table": serve, "actor": insert}[sys.argv[1]](*sys.argv[2:])
