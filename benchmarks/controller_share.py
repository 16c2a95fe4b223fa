"""Let four clients share the device of one island, by weight.

    python -m benchmarks.controller_share

Each client calls an op again and again, from a thread of its own; its ops sleep 2 to 6
ms on the device, so time says who had it. `worst_error` is the largest distance of a
client's share of that time from its weight's, for weights 1:1:1:1 and 1:2:4:8, relative
to it; every client makes at least 200 ops. `throughput` is the ops that the four make
together in a second over those of one alone, all of 5 ms; the median of rounds.
"""

import collections
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Sequence

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
from absl import app, flags

from replicator import controller

_OPS = flags.DEFINE_integer("ops", 200, "Number of ops that each client makes.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Times that throughput is measured.")
_MS = (2.0, 6.0, 4.0, 2.0)
_EQUAL_MS = (5.0,) * 4
_WEIGHTS = (1, 1, 1, 1), (1, 2, 4, 8)


def main(argv: list[str]) -> None:
    """Measure shares and throughput, and print both."""
    del argv
    started_s = time.monotonic()
    errors: dict[str, list[float]] = {}
    for weights in _WEIGHTS:
        ends = _ends(weights, _MS)
        shares = _shares(ends)
        wanted = [weight / sum(weights) for weight in weights]
        errors[":".join(map(str, weights))] = [
            round(abs(shares[n] / each - 1), 4) for n, each in enumerate(wanted)
        ]
    per_s = [
        [_per_s(_ends((1,) * clients, _EQUAL_MS)) for clients in (4, 1)]
        for _ in range(_ROUNDS.value)
    ]
    print(json.dumps({"errors": errors, "per_s": per_s}))
    result = {
        "worst_error": max(map(max, errors.values())),
        "throughput": round(statistics.median(a / b for a, b in per_s), 3),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


def _ends(weights: Sequence[float], ms: Sequence[float]) -> list[tuple[float, int]]:
    """Return when each op ended and whose it was, while all clients had ops waiting."""
    ends: list[tuple[float, int]] = []
    counts: collections.Counter[int] = collections.Counter()
    begin, stop = threading.Barrier(len(weights)), threading.Event()

    def run(pw: controller.Controller, number: int) -> None:
        def sleep(x: np.ndarray) -> np.ndarray:
            time.sleep(ms[number] / 1e3)
            if not stop.is_set():
                ends.append((time.perf_counter(), number))
                counts[number] += 1
            if len(counts) == len(weights) and min(counts.values()) >= _OPS.value:
                stop.set()
            return np.asarray(x)

        def op(x: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(sleep, shape, x)

        with pw.client(f"client{number}", weight=weights[number]) as client:
            fn, value = client.fn(op, client.slice(1)), np.ones(2, np.float32)
            fn(value).result()
            begin.wait()
            while not stop.is_set():
                fn(value)

    with controller.local(islands=1, devices=1) as pw:
        threads = [
            threading.Thread(target=run, args=(pw, n)) for n in range(len(weights))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return ends[len(ends) // 10 :]  # without those before all had filled their queues


def _shares(ends: Sequence[tuple[float, int]]) -> dict[int, float]:
    """Return each client's share of the device, which runs one op after the other."""
    had_s: dict[int, float] = collections.defaultdict(float)
    for (before_s, _), (end_s, number) in itertools.pairwise(ends):
        had_s[number] += end_s - before_s
    return {number: each / sum(had_s.values()) for number, each in had_s.items()}


def _per_s(ends: Sequence[tuple[float, int]]) -> float:
    return round((len(ends) - 1) / (ends[-1][0] - ends[0][0]), 1)


if __name__ == "__main__":
    app.run(main)
