"""Measure speeds of this host's devices: products, memory, and the links between them.

All devices work at once, as in a step: they may share cores, memory and links. Each
time is the least of several, as whatever else runs only adds to it.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicator.base.mesh import replica_mesh
from replicator.base.types import Device
from replicator.engine.layout import EQUAL, per_replica
from replicator.engine.replicated import ReplicatedLayout
from replicator.strategies.calibration import Calibration

_ROUNDS = 5
_LEAST_S = 0.02
_TURNS = 4
"""Collectives of a call: its dispatch counts once."""


def measure_speeds(
    devices: list[Device], *, edge: int = 0, sizes: tuple[int, ...] = ()
) -> Calibration:
    """Return the speeds of devices of this process.

    Args:
      devices: The devices; all are at work at once.
      edge: Rows and columns of the matrices; by default as many as fill the device.
      sizes: Bytes of a device's array in the all-reduces, in rising order: speed and
        latency are those of a line through the first and the last. Memory is read and
        written in arrays of four times the last.
    """
    on_cpu = devices[0].platform == "cpu"
    edge = edge or (256 if on_cpu else 4096)
    sizes = sizes or ((2**14, 2**20, 2**22) if on_cpu else (2**16, 2**22, 2**26))
    layout = ReplicatedLayout(replica_mesh(devices=devices))
    peaks = {
        dtype: _product_flops_per_s(layout, edge, dtype)
        for dtype in ("float32", "bfloat16", "float16")
    }
    bytes_per_s, latency_s = 0.0, 0.0
    if len(devices) > 1:
        bytes_per_s, latency_s = _all_reduce_speed(layout, len(devices), sizes)
    return Calibration(
        device_kind=devices[0].device_kind,
        devices=len(devices),
        flops_per_s=peaks,
        memory_bytes_per_s=_memory_bytes_per_s(layout, 4 * sizes[-1]),
        host_bytes_per_s=bytes_per_s,
        host_latency_s=latency_s,
    )


def _product_flops_per_s(layout: ReplicatedLayout, edge: int, dtype: str) -> float:
    ones = jnp.full((edge, edge), 1 / edge, dtype)

    def multiply(turns: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, y: x @ y, x)

    return 2 * edge**3 / _turn_s(layout, multiply, ones)


def _memory_bytes_per_s(layout: ReplicatedLayout, size: int) -> float:
    zeros = jnp.zeros(size // 4, jnp.float32)

    def add(turns: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, y: y + 1, x)

    return 2 * zeros.nbytes / _turn_s(layout, add, zeros)


def _all_reduce_speed(
    layout: ReplicatedLayout, devices: int, sizes: tuple[int, ...]
) -> tuple[float, float]:
    """Return the bytes that a device sends a second, and the latency of a hop."""

    def reduce(turns: jax.Array, x: jax.Array) -> jax.Array:
        del turns
        for _ in range(_TURNS):
            x = lax.pmean(x, "replica")
        return x

    run = _spread(layout, reduce)
    arrays = [jnp.ones(size // 4, jnp.float32) for size in sizes]
    seconds = [min(times) / _TURNS for times in _timed(run, arrays)]
    sent = [2 * size * (devices - 1) / devices for size in sizes]
    # Noise may turn the line: then the largest alone counts, without a latency.
    slope = max((seconds[-1] - seconds[0]) / (sent[-1] - sent[0]), 0.0)
    if not slope:
        return sent[-1] / seconds[-1], 0.0
    latency_s = max(seconds[0] - sent[0] * slope, 0.0)
    return 1 / slope, latency_s / (2 * (devices - 1))


Work = Callable[[jax.Array, jax.Array], jax.Array]


def _spread(layout: ReplicatedLayout, work: Work) -> Callable[..., jax.Array]:
    def on_one(turns: jax.Array, x: jax.Array) -> jax.Array:
        return work(turns, x).ravel()[:1]

    return jax.jit(layout.spread(on_one, inputs=(EQUAL, EQUAL), outputs=per_replica()))


def _turn_s(layout: ReplicatedLayout, work: Work, x: jax.Array) -> float:
    """Return the seconds of a turn, of as many as last long enough to be timed."""
    run, turns = _spread(layout, work), 1
    run(np.int32(turns), x).block_until_ready()
    while True:
        seconds = min(_time(run, turns, x) for _ in range(_ROUNDS))
        if seconds >= _LEAST_S or turns >= 2**16:
            return seconds / turns
        turns *= 2 ** max(1, min(6, int(np.log2(_LEAST_S / max(seconds, 1e-6)))))


def _timed(run: Callable[..., jax.Array], arrays: list[jax.Array]) -> list[list[float]]:
    for each in arrays:
        run(np.int32(1), each).block_until_ready()
    rounds = [[_time(run, 1, each) for each in arrays] for _ in range(_ROUNDS)]
    return [list(times) for times in zip(*rounds, strict=True)]


def _time(run: Callable[..., jax.Array], turns: int, x: jax.Array) -> float:
    started_s = time.perf_counter()
    run(np.int32(turns), x).block_until_ready()
    return time.perf_counter() - started_s
