"""Run a step with its optimizers collecting gradients, or with all collected."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicator.base.types import Key, PyTree
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.engine.metrics import declared as metrics
from replicator.engine.step.optimizer_state import (
    Collected,
    Collecting,
    Learning,
    OptimizerState,
    Showing,
    UpdateCalls,
    empty_slot,
    nothing_yet,
    optimizer_states,
    own_variables,
    with_pending,
    without_pending,
)
from replicator.errors import ArgumentError

KeyedStep = Callable[[PyTree, PyTree, Key | None], tuple[PyTree, PyTree]]
"""A step that always takes a key (maybe None)."""

Sums = list[Collecting | None]
"""Sums per optimizer of the state, in leaf order; None if it does not collect."""


def collect(
    step: KeyedStep, state: PyTree, sums: Sums, batch: PyTree, key: Key | None
) -> tuple[PyTree, Sums, PyTree]:
    """Run the step on one microbatch: optimizers add up, and update nothing.

    Args:
      step: Any keyed step.
      state: A state without anything pending.
      sums: The sums so far.
      batch: One microbatch.
      key: The key of the step.

    Returns:
      The state after it, the sums, and declared metrics.
    """
    after, reported = step(with_pending(state, sums), batch, key)
    after, pending = take_pending(after)
    return after, [_forget_calls(each) for each in pending], metrics.declare(reported)


def finish(
    step: KeyedStep,
    summed: tuple[PyTree, Sums],
    data: tuple[PyTree, Key | None],
    *,
    position: Microbatch,
    show: Showing = "nothing",
) -> tuple[PyTree, list, PyTree]:
    """Run the step with all gradients summed: optimizers reduce, and update.

    Args:
      step: Any keyed step.
      summed: The state before the update, and the sums over all microbatches.
      data: One microbatch, and the key; no result that follows from the sums reads it.
      position: Position of the last microbatch.
      show: As in `Collected`.

    Returns:
      The state after it, the pending values of its optimizers, and declared metrics.
    """
    state, sums = summed
    collected = [
        each
        and Collected(
            total=each.total,
            weight=each.weight,
            count=each.count,
            share=each.share,
            show=show,
            shown=empty_slot(show, each.total, variable),
        )
        for each, variable in zip(sums, own_variables(state), strict=True)
    ]
    with in_microbatch(position):
        after, reported = step(with_pending(state, collected), *data)
    return *take_pending(after), metrics.declare(reported)


def zero_sums(
    step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None, *, count: int
) -> Sums:
    """Trace the step once, abstractly, to learn the arguments of its optimizers.

    Args:
      step: Any keyed step.
      state: Arrays or shapes.
      batch: One microbatch; arrays or shapes.
      key: The key of the step.
      count: Number of microbatches per update.

    Returns:
      Sums of zero.

    Raises:
      ArgumentError: The state holds no optimizer that could collect, or the step calls
        one twice, or under a condition.
    """
    optimizers = optimizer_states(state)
    _check_can_collect(optimizers)
    variables = own_variables(state)
    given = [UpdateCalls() for _ in optimizers]

    def run(state: PyTree, batch: PyTree, key: Key | None) -> list:
        pending = [
            Learning(given=seen) if variable else nothing_yet()
            for variable, seen in zip(variables, given, strict=True)
        ]
        after, _ = step(with_pending(state, pending), batch, key)
        return take_pending(after)[1]

    with in_microbatch(Microbatch(0, count)):
        try:
            shapes = jax.eval_shape(run, state, batch, key)
        except TypeError as error:
            if Collecting.__name__ not in str(error):
                raise
            rule, got = ("`accumulate` must be 1", "more")
            if count == 1:
                rule, got = ("`reduction` must be 'fast'", "'ordered'")
            raise ArgumentError(
                f"{rule} for a step that calls `update` of an optimizer "
                "under `lax.cond`, or in `lax.scan`, `while_loop` or `fori_loop`, got "
                f"{got}. Call it once, outside, and choose between its result and the "
                "old state with `jnp.where`."
            ) from error
    shapes = [
        _learned(each.given) if isinstance(each, Learning) else each for each in shapes
    ]
    for optimizer, shape in zip(optimizers, shapes, strict=True):
        if shape.calls > 1:
            raise ArgumentError(
                f"`update` of the optimizer for `{optimizer.name}` must be called "
                f"once a step under {'accumulation' if count > 1 else 'ordered bits'}, "
                f"got {shape.calls} calls. Give each call an optimizer of its own."
            )
    return [
        _zeros(_forget_calls(shape), variable or jnp.asarray) if shape.calls else None
        for shape, variable in zip(shapes, variables, strict=True)
    ]


def take_pending(state: PyTree) -> tuple[PyTree, list]:
    """Split the pending values of optimizers from the rest of the state."""
    pending = [each.pending for each in optimizer_states(state)]
    return without_pending(state), pending


def _check_can_collect(optimizers: list[OptimizerState]) -> None:
    if not optimizers:
        raise ArgumentError(
            "`accumulate` must be 1 for a step whose state holds no wrapped optimizer, "
            "got more. Wrap it with `rep.wrap_optimizer`."
        )
    if any(each.pending is not None for each in optimizers):
        raise ArgumentError(
            "`accumulate` must be 1 for a step whose optimizer accumulates by itself, "
            "got more. Drop `wrap_optimizer(accumulate=...)`, or compile with "
            "`accumulate=1`."
        )


def _learned(given: UpdateCalls) -> Collecting:
    """Return the shapes of the arguments of `update`, and the number of calls."""
    last = given.calls[-1] if given.calls else nothing_yet()
    return dataclasses.replace(last, calls=len(given.calls))


def _zeros(shapes: PyTree, make: Callable) -> PyTree:
    return jax.tree.map(lambda leaf: make(jnp.zeros(leaf.shape, leaf.dtype)), shapes)


def _forget_calls(pending: Collecting | None) -> Collecting | None:
    return pending and dataclasses.replace(pending, calls=0)
