"""Run 10,000 dataflows over more devices than cores; see what stays in memory.

    python -m benchmarks.controller_soak

Dataflows of two islands of eight devices each, with a collective on either; a client
joins for every hundred of them, keeps ten results until it leaves, and makes a slice
and a function of its own. `growth` is the resident memory at the end over that after a
tenth of them. `leaks` is the number of values on islands after all clients left.
"""

import gc
import json
import os
import time
from typing import Any

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "64")

import jax
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec as P

from benchmarks.rpc_attack.attack import memory_bytes
from replicator import controller

_DATAFLOWS = flags.DEFINE_integer("dataflows", 10_000, "Number of dataflows.")
_DEVICES = 8
_OF_A_CLIENT = 100
_KEPT = 10


def main(argv: list[str]) -> None:
    """Run all, and print growth and leaks."""
    del argv
    started_s = time.monotonic()
    value = np.ones(1024, np.float32)
    clients = -(-_DATAFLOWS.value // _OF_A_CLIENT)
    first_bytes = 0
    with controller.local(islands=2, devices=_DEVICES) as pw:
        ops = [_summed(pw, f"island{n}") for n in range(2)]
        for number in range(clients):
            _run_client(pw, f"client{number}", ops, value)
            if number == max(clients // 10, 1) - 1:
                first_bytes = _resident_bytes()
        last_bytes = _resident_bytes()
        fences = [op(value) for op in ops]
        for fence in fences:
            fence.result()
        islands: Any = pw._islands  # of this process
        ours = {fence._key[0] for fence in fences}
        keys = [key for island in islands.values() for key in [*island._values]]
    result = {
        "growth": round(last_bytes / first_bytes, 4),
        "leaks": sum(run not in ours for run, _ in keys),
        "resident_mb": [first_bytes >> 20, last_bytes >> 20],
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


def _summed(pw: controller.Controller, island: str) -> controller.Function:
    on = pw.slice(_DEVICES, island=island)

    def summed(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x, "devices") / _DEVICES
        return x + total * 1e-3

    body = jax.shard_map(
        summed, mesh=on.mesh, in_specs=P("devices"), out_specs=P("devices")
    )
    return pw.fn(body, on, in_specs=P("devices"), out_specs=P("devices"))


def _run_client(
    pw: controller.Controller,
    name: str,
    ops: list[controller.Function],
    value: np.ndarray,
) -> None:
    first, second = ops
    with pw.client(name) as client:
        own = client.slice(1)
        placed = client.put(value, own)
        flow = client.program(lambda x: second(first(x)))
        kept = [flow(value) for _ in range(_OF_A_CLIENT)][-_KEPT:]
        for each in (placed, *kept):
            each.result()


def _resident_bytes() -> int:
    gc.collect()
    return memory_bytes(os.getpid())


if __name__ == "__main__":
    app.run(main)
