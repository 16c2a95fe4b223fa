"""Compare accumulation over k microbatches with optax, as most and as few write it.

One update of `rep.compile(step_fn, accumulate=k)` is one call: a scan of gradients, one
reduction, one inner update. The others:

- `optax.MultiSteps` as most write it (`speedup`): k calls, each of which reduces its
  gradients and runs the inner optimizer.
- MultiSteps with the mean inside (`speedup_mean_inside`): gradients add up on each
  replica, and the inner transformation reduces them, at the last of k calls alone.
- The scan written by hand (`speedup_scan`): what `accumulate` does, so about 1.

All get batches that lie on the devices, keep four calls in flight, and reduce no metric
but the loss; with the mean inside that, too, is left to each replica.

`reduces_per_update` counts every all-reduce that the compiled program executes in one
update, loops unrolled, that of the metrics included: XLA sends what is reduced at the
same time together.
"""

import itertools
import json

import optax
from absl import app, flags

import replicator
from benchmarks.step.accumulated import mean_inside_loop, multi_steps_loop, scanned_loop
from benchmarks.step.hlo_counts import Operations, compiled_operations
from benchmarks.step.step_pair import (
    OwnLoop,
    placed_batch,
    replicator_init,
    replicator_step,
)
from benchmarks.tasks import Task, mlp
from benchmarks.timing import estimate, ratio, time_rounds

DEVICES = 8
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches per update.")
_MICROBATCH = flags.DEFINE_integer("microbatch", 64, "Examples in each, globally.")
_UPDATES = flags.DEFINE_integer("updates", 5, "Updates per block.")
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Interleaved blocks of each loop.")


def replicator_loop(
    task: Task, rep: replicator.Replicator, *, microbatches: int
) -> tuple[OwnLoop, Operations]:
    """Return the own loop of a replicator user, and what one of its calls executes."""
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))
    step = rep.compile(replicator_step(task, optimizer), accumulate=microbatches)
    assert isinstance(step, replicator.CompiledStep)  # nobody asked to debug
    state = rep.init(replicator_init(task, optimizer))
    options = replicator.InputOptions(accumulate=microbatches)
    batch = placed_batch(rep, [task.batch], options)
    executed = compiled_operations(step.lower(state, batch).compile())
    return OwnLoop(step, state, itertools.repeat(batch)), executed


def main(argv: list[str]) -> None:
    del argv
    replicator.fake_devices(DEVICES)
    rep = replicator.Replicator()
    microbatches, updates = _MICROBATCHES.value, _UPDATES.value
    task = mlp(microbatches * _MICROBATCH.value)
    ours, executed = replicator_loop(task, rep, microbatches=microbatches)
    theirs = multi_steps_loop(task, rep.mesh, microbatches=microbatches)
    inside = mean_inside_loop(task, rep.mesh, microbatches=microbatches)
    scan = scanned_loop(task, rep.mesh, microbatches=microbatches)
    times_s = time_rounds(
        {
            "replicator": lambda: ours.run(updates),
            "MultiSteps": lambda: theirs.run(updates * microbatches),
            "mean inside": lambda: inside.run(updates * microbatches),
            "scan by hand": lambda: scan.run(updates),
        },
        rounds=_ROUNDS.value,
    )
    speedup, speedup_inside, speedup_scan = (
        ratio(times_s[peer], times_s["replicator"])
        for peer in ("MultiSteps", "mean inside", "scan by hand")
    )
    update_ms = estimate(times_s["replicator"]).median / updates * 1e3
    print(f"{speedup} times as fast as MultiSteps, {update_ms:.1f} ms an update")
    print(f"{speedup_inside} times as fast as MultiSteps with the mean inside")
    print(f"{speedup_scan} times as fast as the scan written by hand")
    print(f"an update executes {executed}")
    result = {
        "speedup": round(speedup.median, 2),
        "speedup_low": round(speedup.low, 2),
        "speedup_mean_inside": round(speedup_inside.median, 2),
        "speedup_scan": round(speedup_scan.median, 2),
        "reduces_per_update": executed.collectives,
        "update_ms": round(update_ms, 1),
        "microbatches": microbatches,
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
