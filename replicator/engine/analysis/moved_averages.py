"""Refuse a norm whose running statistics move twice in one of several microbatches.

An average has room for itself alone, and each microbatch moves it by its share of the
update (`batch_norm`). The share of a second call in the same step is another, which
depends on how many calls there are: nobody knows at the first.
"""

from collections.abc import Sequence

from jax.extend import core

from replicator.collectives.markers import MOVED_AVERAGE
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.source_lines import UNKNOWN_LINE, user_line
from replicator.errors import ArgumentError

_ONCE, _TWICE = frozenset({0}), frozenset({0, 1})


class _Moves(dataflow.DependsOn):
    """Mark averages that were moved; remember where it was the second time."""

    second = UNKNOWN_LINE

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[frozenset[int]]
    ) -> list[frozenset[int]] | None:
        if eqn.primitive.name != MOVED_AVERAGE:
            return None
        if not marks[1]:  # what it was moved from
            return [_ONCE]
        self.second = user_line(eqn)
        return [_TWICE]


def refuse_moved_twice(jaxpr: core.Jaxpr, state_leaves: int) -> None:
    """Refuse a step of several microbatches that moves an average more than once.

    Args:
      jaxpr: What one microbatch computes.
      state_leaves: How many of its first outputs are the new state.

    Raises:
      ArgumentError: It does; names the line.
    """
    if not dataflow.find_equation(jaxpr, lambda e: e.primitive.name == MOVED_AVERAGE):
        return
    rules = _Moves()
    marks = dataflow.flow(jaxpr, [rules.clean] * len(jaxpr.invars), rules)
    if _TWICE in marks[:state_leaves]:
        raise ArgumentError(
            "`accumulate` must be 1 where a batch norm moves its running statistics "
            f"twice in a step, got more (at {rules.second}). Call it once on all "
            "examples together, or the second time on a copy: `nnx.clone(model)`."
        )
