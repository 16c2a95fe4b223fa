"""Make one update from k microbatches: exactly the gradient of one batch.

The step runs once per microbatch with its optimizers collecting: gradients add up in a
`lax.scan`, nothing else moves but the state that reads the batch (running statistics).
Then it is traced once more with the sums and the state before the update, for the
parameters, the optimizer states, values that follow from them, and values that follow
from state and key alone (counters, target networks). This last trace does not use its
forward and backward pass, so the compiler drops them: the program is the one written by
hand, a scan of gradients, one reduction, one inner update.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from replicator.base.types import Key, PyTree
from replicator.collectives.all_reduce import all_reduce
from replicator.collectives.context.microbatch import (
    Microbatch,
    RealAsked,
    in_microbatch,
    microbatch,
    noting_in,
)
from replicator.engine.analysis.meeting import MicrobatchCollectiveWarning
from replicator.engine.analysis.moved_averages import refuse_moved_twice
from replicator.engine.analysis.ordered_bits import ordered_scope
from replicator.engine.analysis.source_lines import user_stacklevel
from replicator.engine.metrics import declared as metrics
from replicator.engine.step.gradient_sums import Valued
from replicator.engine.step.microbatch_sums import (
    KeyedStep,
    Sums,
    collect,
    finish,
    zero_sums,
)
from replicator.engine.step.optimizer_state import (
    Collected,
    Learning,
    OwnSums,
    Show,
    Showing,
    UpdateCalls,
    empty_slot,
    optimizer_states,
    own_variables,
    with_pending,
)
from replicator.engine.step.update_dependence import (
    UpdateDependent,
    find_update_dependent,
)
from replicator.inputs.remainder import MASK


class _Microbatches(NamedTuple):
    """Results of the step over all microbatches."""

    summed: tuple[PyTree, Sums]  # the state before the update; all gradients
    data: tuple[PyTree, Key | None]  # the last microbatch, and the key
    moved: list  # the leaves that do not follow from the update, after the last one
    reported: PyTree  # declared metrics, with a leading microbatch axis
    tail: UpdateDependent


ShowingStep = Callable[[PyTree, PyTree, Key | None], tuple[PyTree, PyTree, dict]]
"""An update that also returns the values that its optimizers show, by their names."""


def accumulated(
    step: KeyedStep, count: int, *, show: Showing = "nothing"
) -> ShowingStep:
    """Lift a step over one microbatch to an update over `count` of them.

    Args:
      step: Runs over one microbatch; its state holds the state of a wrapped optimizer.
      count: Number of microbatches per update.
      show: Values that the optimizers show.

    Returns:
      An update whose batch leaves are [count, examples, ...]. Its metrics are declared:
      merged over microbatches, or, where they follow from the update, those of it.

    Raises:
      ArgumentError: When traced: no optimizer can collect, or a result would not
        be that of one microbatch; see `zero_sums` and `find_update_dependent`.
    """

    def update(state: PyTree, batch: PyTree, key: Key | None) -> tuple:
        found = _run_all(step, count, state, batch, key)
        last = Microbatch(count - 1, count)
        after, shown, final = finish(
            step, found.summed, found.data, position=last, show=show
        )
        merged = _fill(found.tail.leaves, jax.tree.leaves(after), found.moved)
        ends, declared = jax.tree.flatten(final, is_leaf=metrics.is_metric)
        means = declared.flatten_up_to(metrics.merge_microbatches(found.reported))
        reported = declared.unflatten(
            end if late else mean
            for late, end, mean in zip(found.tail.metrics, ends, means, strict=True)
        )
        after = jax.tree.structure(after).unflatten(merged)
        return after, reported, by_name(state, shown)

    return update


def single(step: KeyedStep, *, show: Showing = "nothing") -> ShowingStep:
    """Treat the whole batch as the only microbatch of its update; as `accumulated`.

    In a loop of one's own that feeds microbatches one by one
    (`wrap_optimizer(accumulate=k)`) a call knows its number among the k.
    """

    def update(state: PyTree, batch: PyTree, key: Key | None) -> tuple:
        with _own_position(state):
            if microbatch().count > 1:
                closed = jax.make_jaxpr(step)(state, batch, key)
                refuse_moved_twice(closed.jaxpr, len(jax.tree.leaves(state)))
            after, reported = _run_asked(step, show, state, batch, key)
        after, shown = _take_shown(after)
        return after, metrics.declare(reported), by_name(state, shown)

    return update


def by_name(state: PyTree, shown: Sequence) -> dict[str, PyTree]:
    """Return the values that optimizers showed, by their names."""
    return {
        # An optimizer held in variables shows a norm in a variable.
        optimizer.name: jax.tree.leaves(each.shown)[0]
        if each.show == "norm"
        else each.shown
        for optimizer, each in zip(optimizer_states(state), shown, strict=True)
        if isinstance(each, Collected | Show)
        and each.show != "nothing"
        # An optimizer that was not called showed nothing.
        and each.shown is not None
        and (isinstance(each, Collected) or each.given.calls)
    }


def _run_asked(
    step: KeyedStep, show: Showing, state: PyTree, batch: PyTree, key: Key | None
) -> tuple[PyTree, PyTree]:
    """Run a step; ask its optimizers, except those that accumulate, to show a value.

    In a loop of JAX's the value needs a slot from the start on; under `vmap`, and where
    a loop runs over states, there must be none. A norm is not worth an error.
    """
    if show == "nothing":
        return step(state, batch, key)
    totals = _learned(step, state, batch, key) if show != "norm" else None
    ways = [_asking(show, state, totals, is_place_made=made) for made in (False, True)]
    leaves = jax.tree.leaves((state, batch))
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    for asking in ways:
        try:
            if not is_traced:  # to be debugged: on values
                return step(asking, batch, key)
            # By itself: a trace that fails half-way would leave its effects here.
            jax.eval_shape(step, asking, batch, key)
        except Exception as failure:
            # All errors but JAX's about the carry of a loop are the step's own. Traced,
            # they come again below; on values the step would run again for that.
            of_carry = asking is not ways[0] or ".pending.shown" in str(failure)
            if not (is_traced or of_carry):
                raise
        else:
            return step(asking, batch, key)
    return step(state if show == "norm" else ways[-1], batch, key)


def _asking(
    show: Showing, state: PyTree, totals: list | None, *, is_place_made: bool
) -> PyTree:
    pending = [each.pending for each in optimizer_states(state)]
    default = jnp.asarray if is_place_made else None
    asked = [
        each
        or Show(
            show=show,
            given=UpdateCalls(),
            shown=empty_slot(show, total, variable or default),
        )
        for each, total, variable in zip(
            pending, totals or [None] * len(pending), own_variables(state), strict=True
        )
    ]
    return with_pending(state, asked)


def _learned(
    step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None
) -> list[PyTree]:
    """Trace a step abstractly; return shapes of its optimizers' gradients."""
    pending = [each.pending for each in optimizer_states(state)]
    asked = [each or Learning(given=UpdateCalls()) for each in pending]
    jax.eval_shape(step, with_pending(state, asked), batch, key)
    calls = [each.given.calls if isinstance(each, Learning) else [] for each in asked]
    totals = [each[-1].total if each else None for each in calls]
    return [each.grads if isinstance(each, Valued) else each for each in totals]


def _take_shown(after: PyTree) -> tuple[PyTree, list]:
    """Split the values shown from the state; sums that accumulate in it stay."""
    shown = [each.pending for each in optimizer_states(after)]
    kept = [each if isinstance(each, OwnSums) else None for each in shown]
    return with_pending(after, kept), shown


def _own_position(state: PyTree) -> AbstractContextManager[None]:
    """Set the position of a call in a loop of one's own that accumulates."""
    sums = [each.pending for each in optimizer_states(state)]
    own = [each for each in sums if isinstance(each, OwnSums)]
    if len({each.every for each in own}) != 1:
        return nullcontext()
    return in_microbatch(Microbatch(own[0].count, own[0].every))


def _run_all(
    step: KeyedStep, count: int, state: PyTree, batch: PyTree, key: Key | None
) -> _Microbatches:
    """Run the step over all microbatches, collecting."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    with noting_in(asked := RealAsked()):
        start = zero_sums(step, state, first, key, count=count)
    real = _real_microbatches(batch) if asked.by_step else None
    tail = find_update_dependent(step, state, start, first, key, count=count)
    if count > 1:
        _warn_of_meeting(tail)
    leaves, treedef = jax.tree.flatten(state)

    def run_microbatch(carry: tuple, turn: tuple) -> tuple[tuple, PyTree]:
        (moved, sums), (index, microbatch) = carry, turn
        now = treedef.unflatten(_fill(tail.leaves, leaves, moved))
        with in_microbatch(Microbatch(index, count, real=real)):
            after, sums, reported = collect(step, now, sums, microbatch, key)
        return (_others(tail.leaves, jax.tree.leaves(after)), sums), reported

    indices = jnp.arange(count, dtype=jnp.int32)
    (moved, sums), reported = lax.scan(
        run_microbatch, (_others(tail.leaves, leaves), start), (indices, batch)
    )
    return _Microbatches(
        summed=(state, sums),
        data=(jax.tree.map(lambda leaf: leaf[-1], batch), key),
        moved=moved,
        reported=reported,
        tail=tail,
    )


def _warn_of_meeting(tail: UpdateDependent) -> None:
    for origin in tail.meeting:
        warnings.warn(
            f"`{origin.what}` at {origin.where} reduces a microbatch, not the batch: "
            "single examples meet its result, in a loss that `accumulate` above 1 "
            "changes. Compile with `accumulate=1`, or measure the difference by "
            "`replicator.testing.assert_replica_invariant`.",
            MicrobatchCollectiveWarning,
            stacklevel=user_stacklevel(),
        )


def _real_microbatches(batch: PyTree) -> jax.Array | None:
    """Return which microbatches hold a real example on any replica; None: all do.

    Running statistics need that before the first of them runs.
    """
    masks = jax.tree.leaves(batch.get(MASK)) if isinstance(batch, dict) else []
    if not masks:
        return None
    real = [(mask != 0).reshape(len(mask), -1).any(axis=1) for mask in masks]
    with ordered_scope():
        return all_reduce(jnp.stack(real).any(axis=0), "max")


def _fill(late: list[bool], leaves: list, moved: list) -> list:
    """Take `late` leaves from `leaves` and the others from `moved`, in order."""
    rest = iter(moved)
    return [
        leaf if is_late else next(rest)
        for is_late, leaf in zip(late, leaves, strict=True)
    ]


def _others(late: list[bool], leaves: list) -> list:
    return [leaf for is_late, leaf in zip(late, leaves, strict=True) if not is_late]
