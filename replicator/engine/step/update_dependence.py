"""Find what moves once per update, and what moves at every microbatch.

The step is traced once with the summed gradients as inputs of their own, and marks are
followed from there, from the batch, and from the microbatch's index. State that reads
neither batch nor index belongs to the update: parameters, optimizer states and averages
follow from the sums, counters and target networks from state alone. What reads the
batch (running statistics) moves with each microbatch, and so do the counters that go
with it (`counters`).

What would be wrong with several microbatches is refused here, by name: gradients taken
after an update in the same step, results of an update that read the batch other than by
its gradients, and state that is moved by gradients which no wrapped optimizer takes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.per_replica import is_per_replica
from replicator.base.trees import leaf_path, named_leaves
from replicator.base.types import Key, PyTree
from replicator.collectives.context.axes import is_partitioned
from replicator.collectives.context.microbatch import Microbatch
from replicator.engine.analysis import dataflow
from replicator.engine.analysis import replication_check as proof
from replicator.engine.analysis.marks import Origin
from replicator.engine.analysis.meeting import (
    EXAMPLES,
    NOTHING,
    PARAMS,
    MeetingRules,
    is_weights,
)
from replicator.engine.analysis.moved_averages import refuse_moved_twice
from replicator.engine.metrics import declared as metrics
from replicator.engine.step.counters import (
    Counter,
    count_examples,
    find_counters,
    meaning,
)
from replicator.engine.step.microbatch_sums import KeyedStep, Sums, finish
from replicator.engine.step.optimizer_state import (
    OptimizerState,
    is_optimizer_state,
    optimizer_states,
)
from replicator.errors import ArgumentError

# The marks; optimizers are marked 0, 1, …
_BATCH = -1  # reads the batch, or which microbatch it is
_GRADIENT = -2  # reads the batch by a gradient
_COUNTERS = -3  # reads the new value of counter c: _COUNTERS - c


class UpdateDependent(NamedTuple):
    """What only the end of an update yields, and what does not speak for all of it.

    Attributes:
      leaves: Whether it yields a state leaf, of each.
      metrics: Likewise a metric.
      meeting: Collectives over a microbatch whose results single examples meet in a
        loss.
    """

    leaves: list[bool]
    metrics: list[bool]
    meeting: list[Origin]


def find_update_dependent(
    step: KeyedStep, state: PyTree, sums: Sums, batch: PyTree, key: Key | None
) -> UpdateDependent:
    """Tell what moves once per update, and refuse what microbatches would make wrong.

    Args:
      step: Any keyed step.
      state: Without anything pending.
      sums: As `zero_sums` makes them.
      batch: One microbatch.
      key: As the step takes it.

    Returns:
      Which leaves and metrics to take from the last run of the step.

    Raises:
      ArgumentError: Gradients depend on an update in the same step, a leaf or metric on
        both an update and the batch, or a leaf on gradients that no update takes.
    """

    def run(
        sums: Sums, state: PyTree, batch: PyTree, key: Key | None, index: jax.Array
    ) -> tuple:
        position = Microbatch(index, 2, last=True)
        after, pending, reported = finish(
            step, (state, sums), (batch, key), position=position, show="given"
        )
        return after, [each and each.shown for each in pending], reported

    def trace(batch: PyTree) -> tuple:
        arguments = (sums, state, batch, key, jnp.ones((), jnp.int32))
        return jax.make_jaxpr(run, return_shape=True)(*arguments)

    def counters_of(jaxpr: core.Jaxpr) -> dict[int, Counter]:
        return find_counters(jaxpr.outvars[: len(jax.tree.leaves(state))], jaxpr)

    closed, shapes = trace(batch)
    refuse_moved_twice(closed.jaxpr, len(jax.tree.leaves(state)))
    in_marks = [
        *(frozenset({n}) for n, each in enumerate(sums) for _ in jax.tree.leaves(each)),
        *(frozenset() for _ in jax.tree.leaves(state)),
        *(frozenset({_BATCH}) for _ in jax.tree.leaves(batch)),
        *(frozenset() for _ in jax.tree.leaves(key)),
        frozenset({_BATCH}),
    ]
    meeting = _meeting(closed.jaxpr, (sums, state, batch, key, 0), shapes)
    counters = counters_of(closed.jaxpr)
    numbers = {
        counter.meaning: _COUNTERS - n for n, counter in enumerate(counters.values())
    }
    out_marks = dataflow.flow(closed.jaxpr, in_marks, _UpdateRules(numbers))
    if is_partitioned():  # else the proof over replicas finds it
        _warn_of_noise(closed.jaxpr, sums, state, batch, key)
    # Beside the shapes, never in their place: nodes that check themselves take arrays.
    after, shown, reported = shapes
    marks, given, of_metrics = _parted(out_marks, shapes)
    _refuse_chained(optimizer_states(state), _parted(given, shown))
    _refuse_outside_wrap(after, marks)
    _refuse_mixed("state", after, marks)
    _refuse_mixed("metrics", reported, of_metrics)
    declared = jax.tree.leaves(reported, is_leaf=metrics.is_metric)
    moved = dataflow.DependsOn().join([mark for mark in marks if _BATCH in mark])
    with_microbatches = {
        place
        for place, counter in counters.items()
        if numbers[counter.meaning] in moved
    } | count_examples(counters, batch, lambda wide: counters_of(trace(wide)[0].jaxpr))
    return UpdateDependent(
        leaves=[
            _BATCH not in mark and place not in with_microbatches
            for place, mark in enumerate(marks)
        ],
        metrics=[
            any(map(_follows_update, each)) for each in _parted(of_metrics, declared)
        ],
        meeting=meeting,
    )


def _meeting(jaxpr: core.Jaxpr, given: tuple, shapes: tuple) -> list[Origin]:
    """List the collectives whose results meet examples on the way to gradients."""
    sums, state, batch, key, index = given
    in_marks = [
        *(NOTHING for _ in jax.tree.leaves(sums)),
        *(PARAMS if is_weights(leaf) else NOTHING for leaf in jax.tree.leaves(state)),
        *(EXAMPLES for _ in jax.tree.leaves(batch)),
        *(NOTHING for _ in jax.tree.leaves((key, index))),
    ]
    out_marks = dataflow.flow(jaxpr, in_marks, MeetingRules())
    _, marks, _ = _parted(out_marks, shapes)
    return list(dict.fromkeys(mark.meets for mark in marks if mark.meets))


@dataclasses.dataclass(frozen=True)
class _UpdateRules(dataflow.DependsOn):
    """Mark also gradients of the batch, and new values of counters.

    Attributes:
      counters: By equation, the mark of the counter that it computes.
      in_gradient: Whether the equations lie inside a backward pass.
    """

    counters: Mapping[tuple, int]
    in_gradient: bool = False

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[frozenset[int]]
    ) -> list[frozenset[int]] | None:
        if dataflow.sub_jaxprs(eqn):
            return None
        mark = self.join(marks)
        if eqn.primitive.name.startswith(("random_", "threefry", "rng_")):
            # Randomness of the n-th update is no average over n.
            mark = frozenset(each for each in mark if each > _COUNTERS)
        if _BATCH in mark and _GRADIENT not in mark and self._is_gradient(eqn):
            mark |= {_GRADIENT}
        counter = self.counters.get(meaning(eqn)) if self.counters else None
        if counter is not None:
            mark |= {counter}
        return [mark] * len(eqn.outvars)

    def inside(self, eqn: core.JaxprEqn) -> "_UpdateRules":
        return _UpdateRules(self.counters, self._is_gradient(eqn))

    def _is_gradient(self, eqn: core.JaxprEqn) -> bool:
        return self.in_gradient or "transpose(" in str(eqn.source_info.name_stack)


def _warn_of_noise(jaxpr: core.Jaxpr, sums: Sums, *given: PyTree) -> None:
    """Look for random numbers that microbatches share, in the step of one of them."""
    state, batch, key = (len(jax.tree.leaves(each)) for each in given)
    kinds = (proof.CLEAN, proof.STATE, proof.BATCH, proof.CLEAN, proof.BATCH)
    counts = (len(jax.tree.leaves(sums)), state, batch, key, 1)
    in_marks = [
        mark
        for mark, count in zip(kinds, counts, strict=True)
        for mark in [mark] * count
    ]
    proof.warn_of_microbatches(jaxpr, in_marks, slice(state, None))


def _parted(marks: Sequence, trees: Sequence[PyTree]) -> list[list]:
    """Part the marks of leaves by the trees that these are of."""
    rest = iter(marks)
    return [[next(rest) for _ in jax.tree.leaves(tree)] for tree in trees]


def _follows_update(mark: frozenset[int]) -> bool:
    return any(each >= 0 for each in mark)


def _refuse_mixed(where: str, tree: PyTree, marks: Sequence[frozenset[int]]) -> None:
    """Refuse what reads both: it would see the last microbatch alone."""
    for (path, _), mark in zip(named_leaves(tree), marks, strict=True):
        if _BATCH in mark and _follows_update(mark):
            raise ArgumentError(
                f"`accumulate` must be 1 where `{path}` of the returned {where} "
                "depends on an update and, other than by gradients, on the batch. "
                "Compute it before the update, or from reduced values alone."
            )


def _refuse_outside_wrap(state: PyTree, marks: Sequence[frozenset[int]]) -> None:
    """Refuse what gradients move without a wrapped optimizer: k times an update.

    The state of an optimizer is known by its type; parameters that a plain one moves
    are known by the backward pass that they follow from.
    """

    def is_looked_at(node: PyTree) -> bool:
        own = is_optimizer_state(node) or is_per_replica(node)
        return own or _is_of_optax(node)

    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_looked_at)
    parts = _parted(marks, [node for _, node in nodes])
    for (path, node), part in zip(nodes, parts, strict=True):
        if is_optimizer_state(node) or is_per_replica(node):
            continue
        mark = dataflow.DependsOn().join(part)
        if _follows_update(mark):
            continue
        if _GRADIENT in mark or (_is_of_optax(node) and _BATCH in mark):
            raise ArgumentError(
                f"`accumulate` must be 1 where `{leaf_path(path)}` of the returned "
                "state is moved by gradients outside of a wrapped optimizer, got more. "
                "Wrap the one that moves it: `rep.wrap_optimizer(tx, name=...)`."
            )


def _is_of_optax(node: PyTree) -> bool:
    return type(node).__module__.partition(".")[0] == "optax"


def _refuse_chained(optimizers: list[OptimizerState], given: list) -> None:
    """Refuse gradients that were taken after another optimizer's update.

    With k microbatches such a gradient would have to be taken again over all of them,
    after that update; taken once it is not the gradient of one batch.
    """
    for own, shown in enumerate(given):
        marks = dataflow.DependsOn().join(shown)
        for other in {each for each in marks if each >= 0} - {own}:
            raise ArgumentError(
                "`accumulate` must be 1 where gradients depend on an update in the "
                f"same step, got those for `{optimizers[own].name}` after the update "
                f"of `{optimizers[other].name}`. Take both gradients before the first "
                "update, or compile two steps."
            )
