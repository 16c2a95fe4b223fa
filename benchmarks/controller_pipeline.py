"""Run a pipeline of four stages whose ops sleep, and compare with its schedule.

    python -m benchmarks.controller_pipeline

Sleeping callbacks stand for computing, so two cores are enough for four stages.
`ratio` is the time of 16 microbatches forward over (M + S - 1) ops, `process_ratio` the
same on islands in processes; `train_ratio` that of an update with one forward, one
backward over its schedule without moves; `enqueue_share` the part of an update's time
that the call takes; `live` the most microbatches at once between their forward and
backward in the first stage, counted as it runs. Medians of rounds.
"""

import functools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

# Before JAX starts: the pool of XLA's CPU client needs a thread per callback.
os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from replicator import controller
from replicator.controller.pipeline.pipeline import Pipeline
from replicator.controller.pipeline.simulation import simulate

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Times that each is timed.")
_SLEEP_S = flags.DEFINE_float("sleep_s", 0.02, "Seconds that each op takes.")
_STAGES, _MICROBATCHES, _WIDTH = 4, 16, 8


class Alive:
    """Microbatches between their forward and their backward; counted by callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def add(self, count: int) -> None:
        """Note that one began, or ended."""
        with self._lock:
            self._now += count
            self.most = max(self.most, self._now)


def main(argv: list[str]) -> None:
    """Time the pipeline, and print the ratios."""
    del argv
    started_s = time.monotonic()
    x = np.ones((_MICROBATCHES, _WIDTH), np.float32)
    params = [{"w": np.ones(_WIDTH, np.float32)} for _ in range(_STAGES)]
    alive = Alive()
    with controller.local(islands=_STAGES, devices=1) as pw:
        slices = [pw.slice(1, island=f"island{n}") for n in range(_STAGES)]
        stages = [_stage(alive if n == 0 else Alive()) for n in range(_STAGES)]
        pipe = pw.pipeline(stages, _loss, slices, _MICROBATCHES)
        state = pipe.init(params)
        result = _measured(pipe, state, x)
    result["live"] = alive.most
    result["process_ratio"] = _process_ratio(params, x)
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def _measured(
    pipe: Pipeline, state: controller.PipelineState, x: np.ndarray
) -> dict[str, float]:
    ideal = simulate(
        controller.one_f_one_b(_STAGES, _STAGES, _MICROBATCHES),
        stages=_STAGES,
        microbatches=_MICROBATCHES,
        backward=1.0,
    )
    ideal_s = max(span.end for span in ideal.spans) * _SLEEP_S.value
    forward_s = (_MICROBATCHES + _STAGES - 1) * _SLEEP_S.value
    calls = {
        "forward": lambda: pipe.forward(state, x),
        "update": lambda: pipe(state, x).loss,
    }
    for call in calls.values():
        call().result()
    ratios, train_ratios, shares = [], [], []
    for _ in range(_ROUNDS.value):
        _, whole_s = _times_s(lambda: [calls["forward"]()])
        ratios.append(whole_s / forward_s)
        called_s, whole_s = _times_s(lambda: _all(pipe(state, x)))
        train_ratios.append(whole_s / ideal_s)
        shares.append(called_s / whole_s)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "train_ratio": round(statistics.median(train_ratios), 3),
        "enqueue_share": round(statistics.median(shares), 4),
    }


def _process_ratio(params: Sequence[dict], x: np.ndarray) -> float:
    """Return the same as `ratio`, on islands in processes of their own."""
    with controller.start(islands=_STAGES, devices=1, lost_after_s=300) as pw:
        slices = [pw.slice(1, island=f"island{n}") for n in range(_STAGES)]
        # Their counts stay there; a lock could not be sent.
        stages = [functools.partial(_sleeping, _SLEEP_S.value)] * _STAGES
        pipe = pw.pipeline(stages, _loss, slices, _MICROBATCHES)
        state = pipe.init(params)
        pipe.forward(state, x).result()
        rounds = range(_ROUNDS.value)
        times_s = [_times_s(lambda: [pipe.forward(state, x)])[1] for _ in rounds]
    forward_s = (_MICROBATCHES + _STAGES - 1) * _SLEEP_S.value
    return round(statistics.median(times_s) / forward_s, 3)


def _sleeping(seconds: float, params: dict, x: jax.Array) -> jax.Array:
    def slept(x: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return np.asarray(x)

    x = x * params["w"]
    return jax.pure_callback(slept, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _all(update: controller.PipelineUpdate) -> list[controller.Future]:
    return [update.loss, *jax.tree.leaves(update.gradients)]


def _times_s(start: Callable[[], list[controller.Future]]) -> tuple[float, float]:
    """Return the seconds of the call, and those until its results are computed."""
    started_s = time.perf_counter()
    futures = start()
    called_s = time.perf_counter() - started_s
    for future in futures:
        future.result()
    return called_s, time.perf_counter() - started_s


def _stage(alive: Alive) -> Callable[[dict, jax.Array], jax.Array]:
    """Return a stage whose forward and backward sleep, and are counted."""

    def sleep(x: jax.Array, count: int) -> jax.Array:
        def slept(x: np.ndarray) -> np.ndarray:
            alive.add(max(count, 0))
            time.sleep(_SLEEP_S.value)
            alive.add(min(count, 0))
            return np.asarray(x)

        return jax.pure_callback(slept, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def slow(x: jax.Array) -> jax.Array:
        return sleep(x, 0)

    slow.defvjp(lambda x: (sleep(x, 1), None), lambda _, ct: (sleep(ct, -1),))
    return lambda params, x: slow(x * params["w"])


def _loss(y: jax.Array, targets: None) -> jax.Array:
    del targets
    return jnp.square(y).mean()


if __name__ == "__main__":
    app.run(main)
