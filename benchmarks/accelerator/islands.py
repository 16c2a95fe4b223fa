"""Run the controller over the accelerators of a host: an island here, and one beside.

What it computes must be what a direct call computes. `chained` is the chain of
`benchmarks.controller_dispatch`, 128 ops that are not fused, over a loop of the same
jitted function. From another process, whose island is of CPU devices, the accelerators
are an `IslandServer`: a pipeline has a stage on each, and an array goes there and back.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import replicator
from benchmarks import tasks
from benchmarks.accelerator.measured import Numbers, Parts
from benchmarks.step.step_pair import replicator_init, replicator_step
from replicator import controller
from replicator.base.types import PyTree

_OPS, _ROUNDS = 128, 7
_CLIENT_S = 240.0


def islands(*, tiny: bool) -> Parts:
    """Run ops, a step and a pipeline on islands, and time what that costs."""
    jax.config.update("jax_default_matmul_precision", "highest")
    with controller.local(devices=jax.device_count()) as pw:
        wrong = [*_ops(pw), *_step(pw)]
        yield {"island_chained_ratio": round(_chained_ratio(pw), 2)}
    with controller.IslandServer("unix:") as server:
        numbers = _client_of(server.address, tiny=tiny)
    for each in [*wrong, *numbers.pop("wrong")]:
        print(f"FAILED: {each}", flush=True)
        numbers["island_failures"] += 1
    yield numbers


def _ops(pw: controller.Controller) -> list[str]:
    """Return what is wrong with a dataflow of ops and with its gradient."""
    on = pw.slice(jax.device_count())
    a, b = pw.fn(lambda x: x * 2.0, on), pw.fn(jnp.sin, on)
    both = pw.program(lambda x: b(a(x)).sum())
    x = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
    found = np.asarray(pw.program(jax.grad(both))(x))
    return [] if _near(found, 2.0 * np.cos(2.0 * x)) else ["the gradient of ops"]


def _step(pw: controller.Controller) -> list[str]:
    """Return whether three updates as ops differ from direct calls in any bit."""
    task = tasks.mlp(32)
    on = pw.slice(jax.device_count())
    rep = replicator.Replicator(devices=on.devices)
    optimizer = rep.wrap_optimizer(optax.adamw(1e-3))
    step = rep.compile(replicator_step(task, optimizer))
    init = replicator_init(task, optimizer)
    op = pw.fn(step, on)
    direct, state = rep.init(init), rep.init(init)
    for _ in range(3):
        direct, _ = step(direct, task.batch)
        state, _ = op(state, task.batch)
    same = jax.tree.map(_equal, direct, state)
    return [] if all(jax.tree.leaves(same)) else ["the bits of `rep.compile`'s step"]


def _chained_ratio(pw: controller.Controller) -> float:
    op = jax.jit(lambda x: x * 0.5 + 1.0)
    on = pw.slice(1)
    island_op = pw.fn(lambda x: x * 0.5 + 1.0, on)
    given, here = pw.put(np.ones(2, np.float32), on), jnp.ones(2)
    chained = pw.program(lambda x: _chain(island_op, x), fuse=False)
    return _median_s(lambda: chained(given).result()) / _median_s(
        lambda: jax.block_until_ready(_chain(op, here))
    )


def _chain(op: Callable[[PyTree], PyTree], x: PyTree) -> PyTree:
    for _ in range(_OPS):
        x = op(x)
    return x


def _client_of(address: str, *, tiny: bool) -> Numbers:
    """Return the numbers of `main`, in a process of CPU devices."""
    size = 1 << (16 if tiny else 26)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accelerator.islands", address, str(size)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        timeout=_CLIENT_S,
    )
    done.check_returncode()  # its error is above
    return {"island_failures": 0, **json.loads(done.stdout.splitlines()[-1])}


def main(address: str, size: int) -> None:
    """Control the island at an address, and one of this process."""
    jax.config.update("jax_default_matmul_precision", "highest")
    with (
        controller.IslandServer("unix:") as beside,
        controller.connect([beside.address, address]) as pw,
    ):
        slices = [pw.slice(1, island=name) for name in ("island0", "island1")]
        wrong = _pipeline(pw, slices)
        there, back = pw.fn(lambda x: x, slices[1]), pw.fn(lambda x: x, slices[0])
        given = np.arange(size // 4, dtype=np.float32)
        held = pw.put(given, slices[0])
        if not _equal(given, back(there(held))):
            wrong.append("an array that went there and back")
        last = pw.fn(lambda x: x[-1:], slices[0])  # what is read here is small
        moved_s = _median_s(lambda: last(there(held)).result())
    numbers = {"island_gb_per_s": round(2 * size / moved_s / 1e9, 2), "wrong": wrong}
    print(json.dumps(numbers), flush=True)


def _pipeline(pw: controller.Controller, slices: list[controller.Slice]) -> list[str]:
    """Return whether a pipeline over both islands has other gradients than one has."""
    rng = np.random.default_rng(0)
    first, second = (rng.normal(size=(32, 32)).astype(np.float32) for _ in range(2))
    x = rng.normal(size=(16, 32)).astype(np.float32)

    def stage(w: ArrayLike, x: ArrayLike) -> jax.Array:
        return jnp.tanh(jnp.dot(x, w))

    def loss(y: jax.Array, target: ArrayLike) -> jax.Array:
        return ((y - target) ** 2).mean()

    pipe = pw.pipeline([stage, stage], loss, slices, microbatches=4)
    _, found, _ = pipe(pipe.init([first, second]), x, x)

    def whole(weights: list[jax.Array]) -> jax.Array:
        return loss(stage(weights[1], stage(weights[0], x)), x)

    due = jax.grad(whole)([jnp.asarray(first), jnp.asarray(second)])
    same = jax.tree.map(_near, found, due)
    return [] if all(jax.tree.leaves(same)) else ["the gradient of a pipeline"]


def _near(found: PyTree, due: PyTree) -> bool:
    return np.allclose(np.asarray(found), np.asarray(due), rtol=1e-5, atol=1e-6)


def _equal(found: PyTree, due: PyTree) -> bool:
    return np.array_equal(np.asarray(found), np.asarray(due))


def _median_s(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
