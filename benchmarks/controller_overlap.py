"""Run two dataflows with collectives on disjoint devices: both at once, and each alone.

    python -m benchmarks.controller_overlap

An op sums over its two devices, and each device sleeps: so two cores are enough, and
time says what waits for what. `in_process` has the two on two islands of this process,
`processes` on islands that are processes, `one_client` on two slices of one island, as
two sub-meshes of one client of XLA have it. Each is the time of both together over the
longer one alone: 1 is full overlap, 2 none; the median of rounds.
"""

import json
import os
import statistics
import time
from collections.abc import Callable

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec as P

from replicator import controller

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Times that each is timed.")
_SLEEP_S = flags.DEFINE_float("sleep_s", 0.1, "Seconds that each op takes.")
_OPS = 4


def main(argv: list[str]) -> None:
    """Time both arrangements, and print the ratios."""
    del argv
    started_s = time.monotonic()
    with (
        controller.local(islands=2, devices=2) as apart,
        controller.start(islands=2, devices=2, lost_after_s=300) as processes,
        controller.local(islands=1, devices=4) as together,
    ):
        result = {
            "in_process": _ratio(apart),
            "processes": _ratio(processes),
            "one_client": _ratio(together),
        }
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def _ratio(pw: controller.Controller) -> float:
    """Return the time of two dataflows at once over the longer one alone."""
    flows = [_dataflow(pw), _dataflow(pw)]
    value = np.ones(2, np.float32)
    for flow in flows:
        flow(value).result()
    ratios = []
    for _ in range(_ROUNDS.value):
        alone_s = [_time_s(lambda flow=flow: [flow(value)]) for flow in flows]
        both_s = _time_s(lambda: [flow(value) for flow in flows])
        ratios.append(both_s / max(alone_s))
    return round(statistics.median(ratios), 3)


def _time_s(start: Callable[[], list[controller.Future]]) -> float:
    started_s = time.perf_counter()
    for future in start():
        future.result()
    return time.perf_counter() - started_s


def _dataflow(pw: controller.Controller) -> Callable[[np.ndarray], controller.Future]:
    on, sleep_s = pw.slice(2), _SLEEP_S.value

    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(sleep_s)  # it may be sent to a process, which has no flags
        return np.asarray(x)

    def summed(x: jax.Array) -> jax.Array:
        x = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.lax.psum(x, "devices")

    body = jax.shard_map(summed, mesh=on.mesh, in_specs=P("devices"), out_specs=P())
    op = pw.fn(lambda x: body(x), on)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_OPS):
            x = op(jax.numpy.tile(x, 2) / 2)
        return x

    start = pw.fn(lambda x: body(x), on, in_specs=P("devices"))
    return pw.program(lambda x: chain(start(x)), fuse=False)


if __name__ == "__main__":
    app.run(main)
