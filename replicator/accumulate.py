"""Make one update from k microbatches: exactly the gradient of one batch.

The step runs once per microbatch with its optimizers collecting: gradients add up in a
`lax.scan`, nothing else moves but the state that depends on no optimizer (running
statistics, random counters). Then it is traced once more with the sums in hand, for the
parameters, the optimizer states and whatever follows from them. What this last trace
would need of the data (forward and backward pass) is not used, so the compiler drops
it: the program is the one written by hand, a scan of gradients, one reduction, one
inner update.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from replicator import metrics
from replicator.collecting import (
    KeyedStep,
    Sums,
    collect,
    finish,
    take_pending,
    zero_sums,
)
from replicator.collectives.microbatch import Microbatch, in_microbatch
from replicator.optimizer_state import Show, Shown, optimizer_states, with_pending
from replicator.protocols import Key, PyTree
from replicator.tail import Tail, find_tail


class _Collected(NamedTuple):
    """What is known once the step ran over all microbatches."""

    summed: tuple[PyTree, Sums]  # the state before the last microbatch; all gradients
    data: tuple[PyTree, Key | None]  # the last microbatch, and its key
    moved: list  # the leaves that are no tail, after the last microbatch
    reported: PyTree  # declared metrics, with a leading microbatch axis
    tail: Tail


def accumulated(step: KeyedStep, count: int) -> KeyedStep:
    """Lift a step over one microbatch to an update over `count` of them.

    Args:
      step: Runs over one microbatch; its state holds the state of a wrapped optimizer.
      count: Microbatches per update.

    Returns:
      A step whose batch leaves are [count, examples, ...]. Its metrics are declared:
      merged over microbatches, or, where they follow from the update, those of it.

    Raises:
      ArgumentError: When traced: no optimizer can collect, or something would come out
        otherwise than with one microbatch; see `zero_sums` and `find_tail`.
    """

    def update(state: PyTree, batch: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        found = _run_all(step, count, state, batch, key)
        after, _, final = finish(step, found.summed, found.data, count=count)
        merged = _fill(found.tail.leaves, jax.tree.leaves(after), found.moved)
        return jax.tree.structure(after).unflatten(merged), jax.tree.map(
            lambda late, end, mean: end if late else mean,
            found.tail.metrics,
            final,
            metrics.merge_microbatches(found.reported),
            is_leaf=metrics.is_metric,
        )

    return update


def reduced_gradients(
    step: KeyedStep, count: int, *, collects: bool
) -> Callable[[PyTree, PyTree, Key | None], dict[str, PyTree]]:
    """Return a function that makes an update's gradients, and no update.

    Args:
      step: As in `accumulated`.
      count: Microbatches per update.
      collects: Whether the update that is asked about accumulates; it does not if
        `count` is 1 and the reduction is fast.

    Returns:
      `gradients(state, batch, key)`: by the name of each optimizer, its gradient as
      reduced over microbatches and replicas.
    """

    def gradients(state: PyTree, batch: PyTree, key: Key | None) -> dict[str, PyTree]:
        optimizers = optimizer_states(state)
        if collects:
            found = _run_all(step, count, state, batch, key)
            shown = finish(step, found.summed, found.data, count=count, show="reduced")[
                1
            ]
        else:
            asked = with_pending(state, [Show()] * len(optimizers))
            shown = take_pending(step(asked, batch, _fold(key, 0))[0])[1]
        return {
            optimizer.name: each.gradients
            for optimizer, each in zip(optimizers, shown, strict=True)
            if isinstance(each, Shown)
        }

    return gradients


def _run_all(
    step: KeyedStep, count: int, state: PyTree, batch: PyTree, key: Key | None
) -> _Collected:
    """Run the step over all microbatches, collecting."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    start = zero_sums(step, state, first, key)
    tail = find_tail(step, state, start, first, key)
    leaves, treedef = jax.tree.flatten(state)

    def run_microbatch(carry: tuple, turn: tuple) -> tuple[tuple, PyTree]:
        (moved, _, sums), (index, microbatch) = carry, turn
        now = treedef.unflatten(_fill(tail.leaves, leaves, moved))
        with in_microbatch(Microbatch(index, count)):
            folded = _fold(key, index)
            after, sums, reported = collect(step, now, sums, microbatch, folded)
        return (_others(tail.leaves, jax.tree.leaves(after)), moved, sums), reported

    indices = jnp.arange(count, dtype=jnp.int32)
    others = _others(tail.leaves, leaves)
    carry, reported = lax.scan(
        run_microbatch, (others, others, start), (indices, batch)
    )
    moved, moved_before, sums = carry
    return _Collected(
        # The last run repeats the last microbatch, so it starts where that one did.
        summed=(treedef.unflatten(_fill(tail.leaves, leaves, moved_before)), sums),
        data=(jax.tree.map(lambda leaf: leaf[-1], batch), _fold(key, count - 1)),
        moved=moved,
        reported=reported,
        tail=tail,
    )


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
