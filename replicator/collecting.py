"""Run a step with its optimizers collecting gradients, or with all collected."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from replicator import metrics
from replicator.collectives.microbatch import Microbatch, in_microbatch
from replicator.errors import ArgumentError
from replicator.optimizer_state import (
    Collected,
    Collecting,
    OptimizerState,
    Shown,
    optimizer_states,
    with_pending,
    without_pending,
)
from replicator.protocols import Key, PyTree

KeyedStep = Callable[[PyTree, PyTree, Key | None], tuple[PyTree, PyTree]]
"""A step that always takes a key (maybe None)."""

Sums = list[Collecting | None]
"""Per optimizer of the state, in leaf order: its sums; None if it is left alone."""


def collect(
    step: KeyedStep, state: PyTree, sums: Sums, batch: PyTree, key: Key | None
) -> tuple[PyTree, Sums, PyTree]:
    """Run the step on one microbatch: optimizers add up, and update nothing.

    Args:
      step: Any keyed step.
      state: Without anything pending.
      sums: What is added to.
      batch: One microbatch.
      key: As the step takes it.

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
    count: int,
    show: Literal["nothing", "given", "reduced"] = "nothing",
) -> tuple[PyTree, list[Shown | None], PyTree]:
    """Run the step with all gradients summed: optimizers reduce, and update.

    Args:
      step: Any keyed step.
      summed: The state before the last microbatch, and the sums over all.
      data: The last microbatch and its key.
      count: Microbatches per update.
      show: As in `Collected`.

    Returns:
      The state after it, what was asked to be shown, and declared metrics.
    """
    state, sums = summed
    collected = [
        each
        and Collected(
            total=each.total,
            weight=each.weight,
            count=each.count,
            weighted=each.weighted,
            show=show,
        )
        for each in sums
    ]
    with in_microbatch(Microbatch(count - 1, count)):
        after, reported = step(with_pending(state, collected), *data)
    return *take_pending(after), metrics.declare(reported)


def zero_sums(step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None) -> Sums:
    """Trace the step once, abstractly, to learn what its optimizers are given.

    Args:
      step: Any keyed step.
      state: Arrays or shapes.
      batch: One microbatch; arrays or shapes.
      key: As the step takes it.

    Returns:
      Sums of nothing.

    Raises:
      ArgumentError: The state holds no optimizer that could collect, or the step calls
        one twice, or under a condition.
    """
    optimizers = optimizer_states(state)
    _check_can_collect(optimizers)
    empty = Collecting(total=None, weight=jnp.zeros(()), count=jnp.zeros((), jnp.int32))

    def run(state: PyTree, batch: PyTree, key: Key | None) -> list:
        after, _ = step(with_pending(state, [empty] * len(optimizers)), batch, key)
        return take_pending(after)[1]

    with in_microbatch(Microbatch(0, 2)):
        try:
            shapes = jax.eval_shape(run, state, batch, key)
        except TypeError as error:
            if Collecting.__name__ not in str(error):
                raise
            raise ArgumentError(
                "`accumulate` must be 1 for a step that calls `update` of an optimizer "
                "under `lax.cond`, got more. Call it always, and choose between its "
                "result and the old state with `jnp.where`."
            ) from error
    for optimizer, shape in zip(optimizers, shapes, strict=True):
        if shape.calls > 1:
            raise ArgumentError(
                f"`update` of the optimizer for `{optimizer.name}` must be called "
                f"once a step under accumulation, got {shape.calls} calls. Give each "
                "call an optimizer of its own."
            )
    return [
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _forget_calls(s))
        if s.calls
        else None
        for s in shapes
    ]


def take_pending(state: PyTree) -> tuple[PyTree, list]:
    """Part what optimizers keep within an update from the rest of the state."""
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


def _forget_calls(pending: Collecting | None) -> Collecting | None:
    return pending and dataclasses.replace(pending, calls=0)
