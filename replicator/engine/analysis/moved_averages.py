"""Refuse a norm whose running statistics move twice in one of several microbatches.

An average holds only itself, and each microbatch moves it by its share of the update
(`batch_norm`). With a second call in the same step the shares depend on the number of
calls, which is not known at the first.
"""

from collections.abc import Sequence

from jax.extend import core

from replicator.collectives.markers import MOVED_AVERAGE
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.source_lines import UNKNOWN_LINE, user_line
from replicator.errors import ArgumentError

_ONCE, _TWICE = frozenset({0}), frozenset({0, 1})


class _Moves(dataflow.DependsOn):
    """Rules that mark moved averages; they remember the line of the second move."""

    second = UNKNOWN_LINE

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[frozenset[int]]
    ) -> list[frozenset[int]] | None:
        if eqn.primitive.name != MOVED_AVERAGE:
            return None
        if not marks[1]:  # of the old value
            return [_ONCE]
        self.second = user_line(eqn)
        return [_TWICE]


def refuse_moved_twice(jaxpr: core.Jaxpr, state_leaves: int) -> None:
    """Refuse a step of several microbatches that moves an average more than once.

    Args:
      jaxpr: Program of one microbatch.
      state_leaves: Number of its first outputs that are the new state.

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
