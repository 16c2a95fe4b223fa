"""Time what it costs to have ops run by the controller.

    python -m benchmarks.controller_dispatch

A chain of 128 ops, each a sum over four devices and an addition. `chained_ratio`: the
chain unfused on an island that is a process, sent in one message, over a loop of the
same jitted function here. `fused_ratio`: as one op, over one jitted function of all.
`ray_speedup`: as calls of an actor of Ray, over op by op, a call each. `read_ratio`:
steps of 20 ms (sleeping callbacks) whose eight numbers are read each time, over steps
whose numbers nobody reads. Medians of rounds, in turns.
"""

import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from replicator import controller
from replicator.base.host.fake_devices import fake_devices

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Times that each is timed.")
_OPS = flags.DEFINE_integer("ops", 128, "Ops of the chain.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps that are read, or not.")
_STEP_S = flags.DEFINE_float("step_s", 0.02, "Seconds that each takes.")
_RAY = flags.DEFINE_boolean("ray", True, "Whether to compare with Ray.")
_DEVICES = 4
Timed = dict[str, Callable[[], object]]


def main(argv: list[str]) -> None:
    """Time all, and print the ratios."""
    del argv
    started_s = time.monotonic()
    fake_devices(_DEVICES)
    with controller.start(islands=1, devices=_DEVICES, lost_after_s=300) as pw:
        runs = _chains(pw) | _steps(pw)
        if _RAY.value:
            runs["ray"] = _ray_chain()
        times = _timed(runs)
    result: dict[str, Any] = {
        "chained_ratio": round(times["chained"] / times["loop"], 3),
        "fused_ratio": round(times["fused"] / times["one_jit"], 3),
        "read_ratio": round(times["read"] / times["unread"], 3),
    }
    has_ray = "ray" in times
    result["ray_speedup"] = (
        round(times["ray"] / times["op_by_op"], 2) if has_ray else None
    )
    result["milliseconds"] = {name: round(s * 1e3, 2) for name, s in times.items()}
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def _timed(runs: Timed) -> dict[str, float]:
    """Return the median seconds of each, after a first run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_ROUNDS.value + 1):
        for name, run in runs.items():
            began_s = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began_s)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _op(mesh: Any) -> Callable[[jax.Array], jax.Array]:
    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "devices") / _DEVICES + 1

    return jax.shard_map(summed, mesh=mesh, in_specs=P(), out_specs=P())


def _chain(op: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(_OPS.value):
        x = op(x)
    return x


def _chains(pw: controller.Controller) -> Timed:
    on = pw.slice(_DEVICES)
    op = pw.fn(_op(on.mesh), on)
    chained = pw.program(lambda x: _chain(op, x), fuse=False)
    fused = pw.program(lambda x: _chain(op, x))
    given = pw.put(np.ones(2, np.float32), on)
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    here = jax.device_put(np.ones(2, np.float32), NamedSharding(mesh, P()))
    jitted = jax.jit(_op(mesh))
    one = jax.jit(lambda x: _chain(_op(mesh), x))
    return {
        "loop": lambda: jax.block_until_ready(_chain(jitted, here)),
        "chained": lambda: chained(given).result(),
        "one_jit": lambda: jax.block_until_ready(one(here)),
        "fused": lambda: fused(given).result(),
        "op_by_op": lambda: _chain(op, given).result(),
    }


def _steps(pw: controller.Controller) -> Timed:
    on, step_s = pw.slice(1), _STEP_S.value

    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(step_s)  # it is sent to a process, which has no flags
        return np.asarray(x) + 1

    def step_fn(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        x = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x, [jnp.sum(x) * n for n in range(8)]

    step = pw.fn(step_fn, on)
    start = pw.put(np.zeros(2, np.float32), on)

    def run(read: Callable[[Any], object]) -> None:
        x = start
        for _ in range(_STEPS.value):
            x, numbers = step(x)
            read(numbers)
        x.result()

    return {
        "unread": lambda: run(lambda _: None),
        "read": lambda: run(controller.read),
    }


def _ray_chain() -> Callable[[], object]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)

    @ray.remote
    class Chained:
        def __init__(self) -> None:
            fake_devices(_DEVICES)
            mesh = Mesh(np.array(jax.devices()), ("devices",))
            self._op = jax.jit(_op(mesh))
            self._place = NamedSharding(mesh, P())

        def op(self, x: np.ndarray) -> np.ndarray:
            return np.asarray(self._op(jax.device_put(x, self._place)))

    actor: Any = Chained.remote()  # pyright: ignore[reportFunctionMemberAccess]

    def run() -> object:
        return ray.get(_chain(actor.op.remote, np.ones(2, np.float32)))

    return run


if __name__ == "__main__":
    app.run(main)
