"""Make one update from k microbatches: exactly the gradient of one batch.

The step runs once per microbatch with its optimizers collecting: gradients add up in a
`lax.scan`, nothing else moves but the state that depends on no optimizer (running
statistics, random counters). Then it is traced once more with the sums in hand, for the
parameters, the optimizer states and whatever follows from them. What this last trace
would need of the data (forward and backward pass) is not used, so the compiler drops
it: the program is the one written by hand, a scan of gradients, one reduction, one
inner update.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from replicator import dataflow, metrics
from replicator.collectives.microbatch import Microbatch, in_microbatch
from replicator.errors import ArgumentError
from replicator.optimizer_state import (
    Collected,
    Collecting,
    OptimizerState,
    Show,
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


class _Tail(NamedTuple):
    """What only the last run yields: a bool per state leaf, and one per metric."""

    leaves: list[bool]
    metrics: PyTree


class _Every(NamedTuple):
    """What is known once the step ran over all microbatches."""

    last: tuple  # what `_finish` takes
    moved: list  # the leaves that are no tail, after the last microbatch
    reported: PyTree  # declared metrics, with a leading microbatch axis
    tail: _Tail


def accumulated(step: KeyedStep, count: int) -> KeyedStep:
    """Lift a step over one microbatch to an update over `count` of them.

    Args:
      step: Runs over one microbatch; its state holds the state of a wrapped optimizer.
      count: Microbatches per update.

    Returns: A step whose batch leaves are [count, examples, ...]; its metrics are
      declared, and merged over microbatches.

    Raises:
      ArgumentError: When traced: the state holds no wrapped optimizer, one is updated
        twice, or the gradients of one depend on the update of another.
    """

    def update(state: PyTree, batch: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        every = _run_all(step, count, state, batch, key)
        after, _, final = _finish(step, *every.last)
        merged = _fill(every.tail.leaves, jax.tree.leaves(after), every.moved)
        return jax.tree.structure(after).unflatten(merged), jax.tree.map(
            lambda late, end, mean: end if late else mean,
            every.tail.metrics,
            final,
            metrics.merge_microbatches(every.reported),
            is_leaf=metrics.is_metric,
        )

    return update


def reduced_gradients(
    step: KeyedStep, count: int, *, collect: bool
) -> Callable[[PyTree, PyTree, Key | None], dict[str, PyTree]]:
    """Return a function that makes an update's gradients, and no update.

    Args:
      step: As in `accumulated`.
      count: Microbatches per update.
      collect: Whether the update that is asked about accumulates; it does not if
        `count` is 1 and the reduction is fast.

    Returns:
      `gradients(state, batch, key)`: by the name of each optimizer, its gradient as
      reduced over microbatches and replicas.
    """

    def gradients(state: PyTree, batch: PyTree, key: Key | None) -> dict[str, PyTree]:
        optimizers = optimizer_states(state)
        if collect:
            every = _run_all(step, count, state, batch, key)
            shown = _finish(step, *every.last, show="reduced")[1]
        else:
            asked = with_pending(state, [Show()] * len(optimizers))
            shown = _take_pending(step(asked, batch, _fold(key, 0))[0])[1]
        return {
            optimizer.name: each.gradients
            for optimizer, each in zip(optimizers, shown, strict=True)
            if isinstance(each, Shown)
        }

    return gradients


def follows_optimizer(
    step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None
) -> list[bool]:
    """Tell which leaves of the state depend on an optimizer's gradients.

    Args:
      step: As in `accumulated`.
      state: Arrays or shapes.
      batch: One microbatch; arrays or shapes.
      key: As the step takes it.

    Returns:
      A bool per leaf of `state`: parameters, optimizer states, averages of them.
    """
    return _find_tail(
        step, state, _zero_sums(step, state, batch, key), batch, key
    ).leaves


def _run_all(
    step: KeyedStep, count: int, state: PyTree, batch: PyTree, key: Key | None
) -> _Every:
    """Run the step over all microbatches, collecting."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    start = _zero_sums(step, state, first, key)
    tail = _find_tail(step, state, start, first, key)
    leaves, treedef = jax.tree.flatten(state)

    def run_microbatch(carry: tuple, turn: tuple) -> tuple[tuple, PyTree]:
        (moved, sums), (index, microbatch) = carry, turn
        now = treedef.unflatten(_fill(tail.leaves, leaves, moved))
        with in_microbatch(Microbatch(index, count)):
            folded = _fold(key, index)
            after, sums, reported = _collect(step, now, sums, microbatch, folded)
        return (_others(tail.leaves, jax.tree.leaves(after)), sums), reported

    indices = jnp.arange(count, dtype=jnp.int32)
    carry = (_others(tail.leaves, leaves), start)
    (moved, sums), reported = lax.scan(run_microbatch, carry, (indices, batch))
    now = treedef.unflatten(_fill(tail.leaves, leaves, moved))
    last = jax.tree.map(lambda leaf: leaf[-1], batch)
    final = (now, sums, last, _fold(key, count - 1), count)
    return _Every(last=final, moved=moved, reported=reported, tail=tail)


def _collect(
    step: KeyedStep, state: PyTree, sums: Sums, batch: PyTree, key: Key | None
) -> tuple[PyTree, Sums, PyTree]:
    """Run the step on one microbatch: optimizers add up, and update nothing."""
    after, reported = step(with_pending(state, sums), batch, key)
    after, pending = _take_pending(after)
    return after, [_forget_calls(each) for each in pending], metrics.declare(reported)


def _finish(
    step: KeyedStep,
    state: PyTree,
    sums: Sums,
    batch: PyTree,
    key: Key | None,
    count: int,
    *,
    show: Literal["nothing", "given", "reduced"] = "nothing",
) -> tuple[PyTree, list[Shown | None], PyTree]:
    """Run the step with all gradients summed: optimizers reduce, and update."""
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
        after, reported = step(with_pending(state, collected), batch, key)
    return *_take_pending(after), metrics.declare(reported)


def _zero_sums(step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None) -> Sums:
    """Trace the step once, abstractly, to learn what its optimizers are given."""
    optimizers = optimizer_states(state)
    if not optimizers or any(each.pending is not None for each in optimizers):
        raise ArgumentError(
            "`accumulate` must be 1 for a step "
            + (
                "whose optimizer accumulates by itself. Drop "
                "`wrap_optimizer(accumulate=...)`, or compile with `accumulate=1`."
                if optimizers
                else "whose state holds no wrapped optimizer, got more. Wrap it with "
                "`rep.wrap_optimizer`."
            )
        )
    empty = Collecting(
        total=None, weight=jnp.zeros(()), count=jnp.zeros((), jnp.int32)
    )

    def run(state: PyTree, batch: PyTree, key: Key | None) -> list:
        after, _ = step(with_pending(state, [empty] * len(optimizers)), batch, key)
        return _take_pending(after)[1]

    with in_microbatch(Microbatch(0, 2)):
        shapes = jax.eval_shape(run, state, batch, key)
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


def _find_tail(
    step: KeyedStep, state: PyTree, sums: Sums, batch: PyTree, key: Key | None
) -> _Tail:
    """Find the leaves that depend on the sums, and refuse chained updates."""

    def run(sums: Sums, state: PyTree, batch: PyTree, key: Key | None) -> tuple:
        return _finish(step, state, sums, batch, key, 2, show="given")

    closed, shapes = jax.make_jaxpr(run, return_shape=True)(sums, state, batch, key)
    in_marks = [
        frozenset({position})
        for position, each in enumerate(sums)
        for _ in jax.tree.leaves(each)
    ]
    in_marks += [frozenset()] * (len(closed.jaxpr.invars) - len(in_marks))
    out_marks = dataflow.flow(closed.jaxpr, in_marks, dataflow.DependsOn())
    after, given, reported = jax.tree.structure(shapes).unflatten(out_marks)
    _refuse_chained(optimizer_states(state), given)
    return _Tail(
        leaves=[bool(mark) for mark in jax.tree.leaves(after, is_leaf=_is_mark)],
        metrics=jax.tree.map(
            lambda metric: any(jax.tree.leaves(metric, is_leaf=_is_mark)),
            reported,
            is_leaf=metrics.is_metric,
        ),
    )


def _is_mark(node: PyTree) -> bool:
    return isinstance(node, frozenset)


def _refuse_chained(
    optimizers: list[OptimizerState], given: list[Shown | None]
) -> None:
    """Refuse gradients that were taken after another optimizer's update.

    With k microbatches such a gradient would have to be taken again over all of them,
    after that update; taken once it is not the gradient of one batch.
    """
    for own, gradients in enumerate(given):
        marks = dataflow.DependsOn().join(jax.tree.leaves(gradients, is_leaf=_is_mark))
        for other in marks - {own}:
            raise ArgumentError(
                f"`accumulate` must be 1 where the gradients for "
                f"`{optimizers[own].name}` depend on the update of "
                f"`{optimizers[other].name}` in the same step. Take both gradients "
                "before the first update, or compile two steps."
            )


def _take_pending(state: PyTree) -> tuple[PyTree, list]:
    pending = [each.pending for each in optimizer_states(state)]
    return without_pending(state), pending


def _forget_calls(pending: Collecting | None) -> Collecting | None:
    return pending and dataclasses.replace(pending, calls=0)


def _fold(key: Key | None, index: jax.Array | int) -> Key | None:
    return None if key is None else jax.random.fold_in(key, index)


def _fill(late: list[bool], leaves: list, moved: list) -> list:
    """Take `late` leaves from `leaves` and the others from `moved`, in order."""
    rest = iter(moved)
    return [
        leaf if is_late else next(rest)
        for is_late, leaf in zip(late, leaves, strict=True)
    ]


def _others(late: list[bool], leaves: list) -> list:
    return [leaf for is_late, leaf in zip(late, leaves, strict=True) if not is_late]
