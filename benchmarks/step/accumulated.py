"""Updates over microbatches as users of optax write them, each as a loop."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from benchmarks.step.step_pair import (
    OwnLoop,
    hand_written_state,
    hand_written_step,
    on_every_replica,
)
from benchmarks.tasks import Task
from replicator.base.mesh import split_over_replicas
from replicator.base.types import PyTree


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
    return _in_turn(task, tx, hand_written_step(task, tx, mesh), mesh, microbatches)


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
