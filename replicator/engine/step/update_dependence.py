"""Find the state that moves once per update, and the state that microbatches move.

The step is traced once with the summed gradients as inputs of their own, and marks are
followed from there, from the batch, and from the microbatch's index. State that reads
neither batch nor index belongs to the update: parameters, optimizer states and averages
follow from the sums, counters and target networks from state alone. State that reads
the batch (running statistics) moves with each microbatch, and so does state that goes
with it, or asks for the number of the microbatch (`counters`).

Steps that would be wrong with several microbatches are refused here, by name: gradients
taken after an update in the same step, results of an update that read the batch other
than by its gradients, and state moved by gradients that no wrapped optimizer takes.
"""

import dataclasses
from collections.abc import Sequence
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
from replicator.engine.step.counters import Leaves, TracedUpdate, find_moving
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
_LAST = -3  # asks whether this microbatch is the last


class UpdateDependent(NamedTuple):
    """Results that only the end of an update yields.

    Attributes:
      leaves: Whether each state leaf is one.
      metrics: Whether each metric is one.
      meeting: Collectives over a microbatch whose results single examples meet in a
        loss.
    """

    leaves: list[bool]
    metrics: list[bool]
    meeting: list[Origin]


def find_update_dependent(
    step: KeyedStep,
    state: PyTree,
    sums: Sums,
    batch: PyTree,
    key: Key | None,
    *,
    count: int,
) -> UpdateDependent:
    """Find results that move once per update; refuse steps that would be wrong.

    Args:
      step: Any keyed step.
      state: A state without anything pending.
      sums: Sums from `zero_sums`.
      batch: One microbatch.
      key: The key of the step.
      count: Number of microbatches per update.

    Returns:
      Leaves and metrics to take from the last run of the step.

    Raises:
      ArgumentError: Gradients depend on an update in the same step, a leaf or metric on
        both an update and the batch, or a leaf on gradients that no update takes; or
        it is unknown, and matters, how a leaf moves.
    """
    closed, shapes = _traced(step, (sums, state, batch, key), count)
    refuse_moved_twice(closed.jaxpr, len(jax.tree.leaves(state)))
    in_marks = [
        *(frozenset({n}) for n, each in enumerate(sums) for _ in jax.tree.leaves(each)),
        *(frozenset() for _ in jax.tree.leaves(state)),
        *(frozenset({_BATCH}) for _ in jax.tree.leaves(batch)),
        *(frozenset() for _ in jax.tree.leaves(key)),
        *(frozenset({_BATCH}), frozenset({_LAST})),
    ]
    meeting = _meeting(closed.jaxpr, (sums, state, batch, key, (0, 0)), shapes)
    out_marks = dataflow.flow(closed.jaxpr, in_marks, _UpdateRules())
    if is_partitioned():  # else the proof over replicas finds it
        _warn_of_noise(closed.jaxpr, sums, state, batch, key)
    # Beside the shapes, not instead of them: nodes that check themselves take arrays.
    after, shown, reported = shapes
    marks, given, of_metrics = _parted(out_marks, shapes)
    _refuse_chained(optimizer_states(state), _parted(given, shown))
    _refuse_outside_wrap(after, marks)
    _refuse_mixed("state", after, marks)
    _refuse_mixed("metrics", reported, of_metrics)
    declared = jax.tree.leaves(reported, is_leaf=metrics.is_metric)
    moving = set()
    if count > 1:
        sizes = [len(jax.tree.leaves(each)) for each in (sums, state, batch, key)]
        known = {*range(sum(sizes[:3]), sum(sizes)), len(in_marks) - 1}
        traced = TracedUpdate(closed, state=sizes[0], known=known)
        whole = (sums, state, _whole(batch, count), key)
        moving = find_moving(
            _leaves(state, marks),
            traced,
            lambda: traced._replace(closed=_traced(step, whole, 1)[0]),
            lone=any(leaf.shape[0] == 1 for leaf in jax.tree.leaves(batch)),
        )
    return UpdateDependent(
        leaves=[
            _BATCH not in mark and place not in moving
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
    """Rules that mark also gradients of the batch.

    Attributes:
      in_gradient: Whether the equations are inside a backward pass.
    """

    in_gradient: bool = False

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[frozenset[int]]
    ) -> list[frozenset[int]] | None:
        if dataflow.sub_jaxprs(eqn):
            return None
        mark = self.join(marks)
        if _BATCH in mark and _GRADIENT not in mark and self._is_gradient(eqn):
            mark |= {_GRADIENT}
        return [mark] * len(eqn.outvars)

    def inside(self, eqn: core.JaxprEqn) -> "_UpdateRules":
        return _UpdateRules(self._is_gradient(eqn))

    def _is_gradient(self, eqn: core.JaxprEqn) -> bool:
        return self.in_gradient or "transpose(" in str(eqn.source_info.name_stack)


def _traced(
    step: KeyedStep, arguments: tuple, count: int
) -> tuple[core.ClosedJaxpr, PyTree]:
    """Trace the end of an update of `count` microbatches.

    Its inputs are sums, state, batch, key, the number of the microbatch, and whether it
    is the last; its results the state, the optimizers' gradients, and metrics.
    """

    def run(*inputs: PyTree) -> tuple:
        sums, state, batch, key, index, last = inputs
        position = Microbatch(index, count, last=last)
        after, pending, reported = finish(
            step, (state, sums), (batch, key), position=position, show="given"
        )
        return after, [each and each.shown for each in pending], reported

    place = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return jax.make_jaxpr(run, return_shape=True)(*arguments, *place)


def _warn_of_noise(jaxpr: core.Jaxpr, sums: Sums, *given: PyTree) -> None:
    """Look for random numbers that microbatches share, in the step of one of them."""
    state, batch, key = (len(jax.tree.leaves(each)) for each in given)
    in_marks = [
        *[proof.CLEAN] * len(jax.tree.leaves(sums)),
        *[proof.STATE] * state,
        *[proof.BATCH] * batch,
        *[proof.CLEAN] * key,
        *(proof.BATCH, proof.CLEAN),  # its number, and whether it is the last
    ]
    proof.warn_of_microbatches(jaxpr, in_marks, slice(state, None))


def _parted(marks: Sequence, trees: Sequence[PyTree]) -> list[list]:
    """Split the marks of leaves by their trees."""
    rest = iter(marks)
    return [[next(rest) for _ in jax.tree.leaves(tree)] for tree in trees]


def _leaves(state: PyTree, marks: Sequence[frozenset[int]]) -> Leaves:
    """Return the properties of the leaves of `state`, by their marks."""
    own = [
        is_optimizer_state(node)
        for node in jax.tree.leaves(state, is_leaf=is_optimizer_state)
        for _ in jax.tree.leaves(node)
    ]
    return Leaves(
        paths=[path for path, _ in named_leaves(state)],
        updated=[
            is_own or _follows_update(mark)
            for is_own, mark in zip(own, marks, strict=True)
        ],
        batch=[_BATCH in mark for mark in marks],
        gated=[_LAST in mark for mark in marks],
    )


def _whole(batch: PyTree, count: int) -> PyTree:
    """Return the shapes of `count` microbatches as one."""

    def joined(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        rows, *others = leaf.shape
        return jax.ShapeDtypeStruct((count * rows, *others), leaf.dtype)

    return jax.tree.map(joined, batch)


def _follows_update(mark: frozenset[int]) -> bool:
    return any(each >= 0 for each in mark)


def _refuse_mixed(where: str, tree: PyTree, marks: Sequence[frozenset[int]]) -> None:
    """Refuse a result that reads both: it would see the last microbatch alone."""
    for (path, _), mark in zip(named_leaves(tree), marks, strict=True):
        if _BATCH in mark and _follows_update(mark):
            raise ArgumentError(
                f"`accumulate` must be 1 where `{path}` of the returned {where} "
                "depends on an update and, other than by gradients, on the batch. "
                "Compute it before the update, or from reduced values alone."
            )


def _refuse_outside_wrap(state: PyTree, marks: Sequence[frozenset[int]]) -> None:
    """Refuse state that gradients move without a wrapped optimizer: k times an update.

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
