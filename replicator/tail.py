"""Find what follows from the optimizers of a step, and moves once per update.

The step is traced once with the summed gradients as inputs of their own, and marks are
followed from there. Parameters, optimizer states and averages depend on the sums;
running statistics and counters do not. What would be wrong with several microbatches is
refused here, by name: gradients taken after an update in the same step, and results of
an update that read the batch other than by its gradients.
"""

from typing import NamedTuple

import jax

from replicator import dataflow, metrics
from replicator.collecting import KeyedStep, Sums, finish, zero_sums
from replicator.errors import ArgumentError
from replicator.optimizer_state import OptimizerState, Shown, optimizer_states
from replicator.protocols import Key, PyTree
from replicator.trees import named_leaves

_BATCH = -1  # the mark of the batch; optimizers are marked 0, 1, …


class Tail(NamedTuple):
    """What only the end of an update yields: a bool per state leaf, and per metric."""

    leaves: list[bool]
    metrics: PyTree


def find_tail(
    step: KeyedStep, state: PyTree, sums: Sums, batch: PyTree, key: Key | None
) -> Tail:
    """Tell what depends on the sums, and refuse what microbatches would make wrong.

    Args:
      step: Any keyed step.
      state: Without anything pending.
      sums: As `zero_sums` makes them.
      batch: One microbatch.
      key: As the step takes it.

    Returns:
      Which leaves and metrics to take from the last run of the step.

    Raises:
      ArgumentError: Gradients depend on an update in the same step, or a leaf or metric
        on both an update and the batch.
    """

    def run(sums: Sums, state: PyTree, batch: PyTree, key: Key | None) -> tuple:
        return finish(step, (state, sums), (batch, key), count=2, show="given")

    closed, shapes = jax.make_jaxpr(run, return_shape=True)(sums, state, batch, key)
    in_marks = [
        *(frozenset({n}) for n, each in enumerate(sums) for _ in jax.tree.leaves(each)),
        *(frozenset() for _ in jax.tree.leaves(state)),
        *(frozenset({_BATCH}) for _ in jax.tree.leaves(batch)),
        *(frozenset() for _ in jax.tree.leaves(key)),
    ]
    out_marks = dataflow.flow(closed.jaxpr, in_marks, dataflow.DependsOn())
    after, given, reported = jax.tree.structure(shapes).unflatten(out_marks)
    _refuse_chained(optimizer_states(state), given)
    for where, tree in (("state", after), ("metrics", reported)):
        _refuse_mixed(where, tree)
    return Tail(
        leaves=[_is_tail(mark) for mark in jax.tree.leaves(after, is_leaf=_is_mark)],
        metrics=jax.tree.map(
            lambda metric: any(
                map(_is_tail, jax.tree.leaves(metric, is_leaf=_is_mark))
            ),
            reported,
            is_leaf=metrics.is_metric,
        ),
    )


def follows_optimizer(
    step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None
) -> list[bool]:
    """Tell which leaves of the state depend on an optimizer's gradients.

    Args:
      step: Any keyed step.
      state: Arrays or shapes.
      batch: One microbatch; arrays or shapes.
      key: As the step takes it.

    Returns:
      A bool per leaf of `state`: true for parameters, optimizer states, averages.
    """
    sums = zero_sums(step, state, batch, key)
    return find_tail(step, state, sums, batch, key).leaves


def _is_mark(node: PyTree) -> bool:
    return isinstance(node, frozenset)


def _is_tail(mark: frozenset[int]) -> bool:
    return bool(mark - {_BATCH})


def _refuse_mixed(where: str, tree: PyTree) -> None:
    """Refuse what reads both: it would see the last microbatch alone."""
    for path, mark in named_leaves(tree, is_leaf=_is_mark):
        if _BATCH in mark and _is_tail(mark):
            raise ArgumentError(
                f"`accumulate` must be 1 where `{path}` of the returned {where} "
                "depends on an update and, other than by gradients, on the batch. "
                "Compute it before the update, or from reduced values alone."
            )


def _refuse_chained(
    optimizers: list[OptimizerState], given: list[Shown | None]
) -> None:
    """Refuse gradients that were taken after another optimizer's update.

    With k microbatches such a gradient would have to be taken again over all of them,
    after that update; taken once it is not the gradient of one batch.
    """
    for own, gradients in enumerate(given):
        marks = dataflow.DependsOn().join(jax.tree.leaves(gradients, is_leaf=_is_mark))
        for other in marks - {own, _BATCH}:
            raise ArgumentError(
                "`accumulate` must be 1 where gradients depend on an update in the "
                f"same step, got those for `{optimizers[own].name}` after the update "
                f"of `{optimizers[other].name}`. Take both gradients before the first "
                "update, or compile two steps."
            )
