"""Time steps that a controller sends to two islands, against two processes' own loops.

    python -m benchmarks.controller_vs_spmd

A step sleeps on each of two devices and sums over them. As JAX has it (SPMD), each of
two processes runs the same loop; as the controller has it, each of two islands gets a
message for each step. `ratio_low` is the time of 20 steps of 20 ms by the controller
over that of the loops, lower 95 % bound; `same_low` that of the loops over themselves,
the noise; both from rounds in turns. `break_even_ms` is the shortest of the steps of
`ratios` whose median is at most 1.05.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.worker import FAST_COMPILER, Worker, serve

# Before JAX starts: the pool of XLA's CPU client needs a thread per callback. Islands
# are compiled as `Worker` has its processes.
os.environ.setdefault("NPROC", "16")
os.environ["XLA_FLAGS"] = FAST_COMPILER

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import ratio, time_rounds
from replicator import controller
from replicator.base.host.fake_devices import fake_devices

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Times that each is timed.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of each.")
_LENGTHS_MS = flags.DEFINE_multi_integer("ms", [5, 10, 20, 50], "Lengths of a step.")
_LOOP = flags.DEFINE_boolean("loop", False, "Be a process with a loop of its own.")
_DEVICES, _JUDGED_MS, _BAR, _LIMIT_S = 2, 20, 1.05, 300.0
START = np.ones(_DEVICES, np.float32)


def main(argv: list[str]) -> None:
    """Time both at each length, and print the ratios."""
    del argv
    if _LOOP.value:
        _serve_loop()
        return
    started_s = time.monotonic()
    command = ["-m", "benchmarks.controller_vs_spmd", "--loop"]
    loops = [Worker(command, timeout_s=_LIMIT_S) for _ in range(2)]
    with (
        controller.start(islands=2, devices=_DEVICES, lost_after_s=_LIMIT_S) as pw,
        ThreadPoolExecutor(len(loops)) as asking,
    ):

        def spmd(length_ms: int) -> None:
            order = {"ms": length_ms, "steps": _STEPS.value}
            list(asking.map(lambda loop: loop.ask(order), loops))

        result = _compared(pw, spmd)
    for loop in loops:
        loop.close()
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def _compared(pw: controller.Controller, spmd: Callable[[int], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"ratios": {}}
    for length_ms in _LENGTHS_MS.value:
        blocks = {
            "controlled": _controlled(pw, length_ms),
            "spmd": lambda length_ms=length_ms: spmd(length_ms),
            "again": lambda length_ms=length_ms: spmd(length_ms),
        }
        times = time_rounds(blocks, rounds=_ROUNDS.value)
        found = ratio(times["controlled"], times["spmd"])
        result["ratios"][length_ms] = round(found.median, 3)
        if length_ms == _JUDGED_MS:
            result["ratio_low"] = round(found.low, 3)
            result["same_low"] = round(ratio(times["again"], times["spmd"]).low, 3)
    even = [each for each, median in result["ratios"].items() if median <= _BAR]
    result["break_even_ms"] = min(even, default=None)
    return result


def _controlled(pw: controller.Controller, length_ms: int) -> Callable[[], None]:
    slices = [pw.slice(_DEVICES, island=f"island{n}") for n in range(2)]
    ops = [pw.fn(_step(on.mesh, length_ms), on) for on in slices]
    starts = [pw.put(START, on, P("devices")) for on in slices]

    @pw.program
    def step(values: list[Any]) -> list[Any]:
        return [op(value) for op, value in zip(ops, values, strict=True)]

    def run() -> None:
        values = starts
        for _ in range(_STEPS.value):
            values = step(values)
        controller.read(values)

    return run


def _step(mesh: Any, length_ms: int) -> Callable[[jax.Array], jax.Array]:
    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(length_ms / 1e3)  # it is sent to a process
        return np.asarray(x)

    def summed(x: jax.Array) -> jax.Array:
        x = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x * jax.lax.psum(x, "devices") / _DEVICES

    spec = P("devices")
    return jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec)


def _serve_loop() -> None:
    """Run steps when asked, in a loop of this process."""
    fake_devices(_DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    start = jax.device_put(START, NamedSharding(mesh, P("devices")))
    known: dict[int, Any] = {}

    def run(order: dict[str, int]) -> bool:
        step = known.get(order["ms"]) or jax.jit(_step(mesh, order["ms"]))
        known[order["ms"]] = step
        x = start
        for _ in range(order["steps"]):
            x = step(x)
        np.asarray(x)
        return True

    serve(run)


if __name__ == "__main__":
    app.run(main)
