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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


def multi_steps_mean_inside(task: Task, tx: Any, mesh: Mesh, microbatches: int):
    """Return the mini-step of a user who knows that only the last one must reduce."""

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, model), grads = task.value_and_grad(state["model"], batch)
        params = task.params_of(model)
        is_last = state["opt"].mini_step == microbatches - 1
        updates, opt = tx.update(grads, state["opt"], params, is_last=is_last)
        model = task.with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return on_every_replica(step_fn, mesh)


def mean_inside(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` on the mean over replicas, which runs where `is_last` is true.

    MultiSteps calls what it wraps at each mini-step, and drops all results but one.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        return lax.cond(
            extra_args["is_last"],
            lambda: tx.update(lax.pmean(updates, "replica"), state, params),
            lambda: (updates, state),
        )

    return optax.GradientTransformationExtraArgs(tx.init, update)


def scanned(
    task: Task, tx: optax.GradientTransformation, mesh: Mesh, microbatches: int
):
    """Return the step that scans over microbatches, as an expert writes it."""

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def add(carry: PyTree, microbatch: PyTree) -> tuple[PyTree, None]:
            model, total = carry
            (loss, model), grads = task.value_and_grad(model, microbatch)
            return (model, jax.tree.map(jnp.add, total, (grads, loss))), None

        params = task.params_of(state["model"])
        zeros = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
        cut = jax.tree.map(
            lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), batch
        )
        (model, total), _ = lax.scan(add, (state["model"], zeros), cut)
        mean = jax.tree.map(lambda leaf: leaf / microbatches, total)
        grads, loss = lax.pmean(mean, "replica")
        updates, opt = tx.update(grads, state["opt"], params)
        model = task.with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return on_every_replica(step_fn, mesh)


def scanned_loop(task: Task, mesh: Mesh, *, microbatches: int) -> OwnLoop:
    """Return the loop around the scan written by hand."""
    tx = optax.adam(1e-3)
    return OwnLoop(
        scanned(task, tx, mesh, microbatches),
        hand_written_state(task, tx, mesh),
        itertools.repeat(jax.device_put(task.batch, split_over_replicas(mesh))),
    )


def multi_steps_loop(task: Task, mesh: Mesh, *, microbatches: int) -> OwnLoop:
    """Return the loop around MultiSteps as most write it."""
    tx = optax.MultiSteps(optax.adam(1e-3), microbatches).gradient_transformation()
    return _in_turn(task, tx, multi_steps(task, tx, mesh), mesh, microbatches)


def mean_inside_loop(task: Task, mesh: Mesh, *, microbatches: int) -> OwnLoop:
    """Return the loop around MultiSteps with the mean inside."""
    inner = mean_inside(optax.adam(1e-3))
    tx = optax.MultiSteps(inner, microbatches).gradient_transformation()
    step = multi_steps_mean_inside(task, tx, mesh, microbatches)
    return _in_turn(task, tx, step, mesh, microbatches)


def _in_turn(
    task: Task,
    tx: optax.GradientTransformation,
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    mesh: Mesh,
    microbatches: int,
) -> OwnLoop:
    """Return the loop that feeds a mini-step the microbatches of `task.batch`."""
    size = len(task.batch["label"]) // microbatches
    cut = [
        jax.tree.map(lambda leaf, i=index: leaf[i * size :][:size], task.batch)
        for index in range(microbatches)
    ]
    placed = jax.device_put(cut, split_over_replicas(mesh))
    return OwnLoop(step, hand_written_state(task, tx, mesh), itertools.cycle(placed))


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
