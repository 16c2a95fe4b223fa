"""Compare `rep.run(steps_per_call=n)`, a `lax.scan`, with one step per call.

Both train the same MLP by SGD. What is gained is the host's share of n - 1 steps: a
dispatch to each device, a batch from the input's thread, a turn of the loop. So it is
measured where this share is large: two replicas, four examples each. With Adam and more
examples (`--optimizer=adam --global_batch=32`) the devices' share grows, and the gain
shrinks.
"""

import json

import optax
from absl import app, flags

import replicator
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tasks import Task, mlp
from benchmarks.timing import estimate, ratio
from replicator.base.host.clock import SystemClock
from replicator.hooks import Hook, StateEvent

DEVICES = 2
OPTIMIZERS = {"sgd": optax.sgd(1e-2), "adam": optax.adam(1e-3)}
_STEPS_PER_CALL = flags.DEFINE_integer("steps_per_call", 20, "Steps in one call.")
_GLOBAL_BATCH = flags.DEFINE_integer("global_batch", 8, "Examples per step.")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "sgd", list(OPTIMIZERS), "Of both runs.")
_CALLS = flags.DEFINE_integer("calls", 40, "Timed calls of many steps in one run.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Interleaved runs of each kind.")


class Stopwatch(Hook):
    """Times a run from a step on, when it is warm, to its end."""

    def __init__(self, first_step: int) -> None:
        self.seconds = 0.0
        self._first_step = first_step
        self._clock = SystemClock()
        self._started_s = 0.0

    def on_state(self, event: StateEvent) -> None:
        """Start at the first step that counts."""
        if event.step == self._first_step:
            self._started_s = self._clock.now_s()

    def on_end(self, event: StateEvent) -> None:
        """Stop; the last step's metrics were read, so it is done."""
        self.seconds = self._clock.now_s() - self._started_s


def seconds_per_step(
    rep: replicator.Replicator,
    task: Task,
    *,
    optimizer: optax.GradientTransformation,
    steps_per_call: int,
    steps: int,
    warm_up: int,
) -> float:
    """Run so many steps after the first `warm_up`; return what one takes."""
    stopwatch = Stopwatch(warm_up)
    wrapped = rep.wrap_optimizer(optimizer)
    rep.run(
        replicator_step(task, wrapped),
        [task.batch],
        init_fn=replicator_init(task, wrapped),
        steps=warm_up + steps,
        steps_per_call=steps_per_call,
        hooks=[stopwatch],
        display=False,
    )
    return stopwatch.seconds / steps


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    rep = replicator.Replicator()
    many, task = _STEPS_PER_CALL.value, mlp(_GLOBAL_BATCH.value)
    times_s: dict[int, list[float]] = {1: [], many: []}
    for _ in range(_ROUNDS.value):
        for steps_per_call, rounds in times_s.items():
            rounds.append(
                seconds_per_step(
                    rep,
                    task,
                    optimizer=OPTIMIZERS[_OPTIMIZER.value],
                    steps_per_call=steps_per_call,
                    steps=_CALLS.value * many,
                    warm_up=5 * many,
                )
            )
    speedup = ratio(times_s[1], times_s[many])
    step_us = estimate(times_s[many]).median * 1e6
    print(f"{speedup} times as fast as one step per call, {step_us:.0f} µs a step")
    result = {
        "speedup": round(speedup.median, 2),
        "speedup_low": round(speedup.low, 2),
        "step_us": round(step_us),
        "steps_per_call": many,
        "global_batch": _GLOBAL_BATCH.value,
        "optimizer": _OPTIMIZER.value,
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
