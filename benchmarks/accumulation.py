"""Compare accumulation over k microbatches with `optax.MultiSteps` as users write it.

One update of `rep.compile(step_fn, accumulate=k)` is one call: a scan of gradients, one
reduction, one inner update. With MultiSteps it is k calls, each of which reduces its
gradients and runs the inner optimizer. Both get batches that lie on the devices, and
keep four calls in flight; MultiSteps reduces no metric but the loss.

`reduces_per_update` counts every all-reduce that the compiled program executes in one
update, loops unrolled, that of the metrics included: XLA sends what is reduced at the
same time together.
"""

import itertools
import json

import jax
import optax
from absl import app, flags
from jax import lax
from jax.sharding import Mesh

import replicator
from benchmarks.step.hlo_counts import Operations, compiled_operations
from benchmarks.step.step_pair import (
    OwnLoop,
    hand_written_state,
    on_every_replica,
    placed_batch,
    replicator_init,
    replicator_step,
)
from benchmarks.tasks import Task, mlp
from benchmarks.timing import estimate, ratio, time_rounds
from replicator.base.mesh import split_over_replicas
from replicator.base.types import PyTree

DEVICES = 8
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches per update.")
_MICROBATCH = flags.DEFINE_integer("microbatch", 64, "Examples in each, globally.")
_UPDATES = flags.DEFINE_integer("updates", 5, "Updates per block.")
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Interleaved blocks of each loop.")


def multi_steps(task: Task, tx: optax.GradientTransformation, mesh: Mesh):
    """Return the mini-step of a MultiSteps user, jitted over the mesh."""

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, model), grads = task.value_and_grad(state["model"], batch)
        grads, loss = lax.pmean((grads, loss), "replica")
        params = task.params_of(model)
        updates, opt = tx.update(grads, state["opt"], params)
        model = task.with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return on_every_replica(step_fn, mesh)


def multi_steps_loop(task: Task, mesh: Mesh, *, microbatches: int) -> OwnLoop:
    """Return the loop that feeds MultiSteps the microbatches of `task.batch`."""
    every = optax.MultiSteps(optax.adam(1e-3), every_k_schedule=microbatches)
    tx = every.gradient_transformation()
    size = len(task.batch["label"]) // microbatches
    cut = [
        jax.tree.map(lambda leaf, i=index: leaf[i * size :][:size], task.batch)
        for index in range(microbatches)
    ]
    placed = jax.device_put(cut, split_over_replicas(mesh))
    return OwnLoop(
        multi_steps(task, tx, mesh),
        hand_written_state(task, tx, mesh),
        itertools.cycle(placed),
    )


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
    times_s = time_rounds(
        {
            "replicator": lambda: ours.run(updates),
            "MultiSteps": lambda: theirs.run(updates * microbatches),
        },
        rounds=_ROUNDS.value,
    )
    speedup = ratio(times_s["MultiSteps"], times_s["replicator"])
    update_ms = estimate(times_s["replicator"]).median / updates * 1e3
    print(f"{speedup} times as fast as MultiSteps, {update_ms:.1f} ms an update")
    print(f"an update executes {executed}")
    result = {
        "speedup": round(speedup.median, 2),
        "speedup_low": round(speedup.low, 2),
        "reduces_per_update": executed.collectives,
        "update_ms": round(update_ms, 1),
        "microbatches": microbatches,
        "devices": DEVICES,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
