"""Compare n steps in one call, a `lax.scan`, with n calls of one step.

Both make the same updates of the same MLP, from batches that lie on the devices; the
gain is the host's time of n - 1 dispatches.
"""

import itertools
import json

import optax
from absl import app, flags

import replicator
from benchmarks.step_pair import (
    OwnLoop,
    placed_batch,
    replicator_init,
    replicator_step,
)
from benchmarks.tasks import Task, mlp
from benchmarks.timing import estimate, ratio, time_rounds

DEVICES = 2
_STEPS_PER_CALL = flags.DEFINE_integer("steps_per_call", 20, "Steps in one call.")
_GLOBAL_BATCH = flags.DEFINE_integer("global_batch", 32, "Examples per step.")
_CALLS = flags.DEFINE_integer("calls", 5, "Calls of many steps in one block.")
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Interleaved blocks of each loop.")


def own_loop(task: Task, rep: replicator.Replicator, *, steps_per_call: int) -> OwnLoop:
    """Return a loop whose calls make so many steps."""
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))
    step_fn = replicator_step(task, optimizer)
    options = replicator.InputOptions(steps_per_call=steps_per_call)
    return OwnLoop(
        rep.compile(step_fn, steps_per_call=steps_per_call),
        rep.init(replicator_init(task, optimizer)),
        itertools.repeat(placed_batch(rep, [task.batch], options)),
    )


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    rep = replicator.Replicator()
    steps_per_call, calls = _STEPS_PER_CALL.value, _CALLS.value
    task = mlp(_GLOBAL_BATCH.value)
    many = own_loop(task, rep, steps_per_call=steps_per_call)
    one = own_loop(task, rep, steps_per_call=1)
    times_s = time_rounds(
        {
            "many": lambda: many.run(calls),
            "one": lambda: one.run(calls * steps_per_call),
        },
        rounds=_ROUNDS.value,
    )
    speedup = ratio(times_s["one"], times_s["many"])
    step_us = estimate(times_s["many"]).median / (calls * steps_per_call) * 1e6
    print(f"{speedup} times as fast as one step per call, {step_us:.0f} µs a step")
    result = {
        "speedup": round(speedup.median, 2),
        "speedup_low": round(speedup.low, 2),
        "step_us": round(step_us),
        "steps_per_call": steps_per_call,
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
