"""Rules of an analysis that know the calls and loops around an equation."""

import dataclasses
from typing import Self, TypeVar

from jax.extend import core

from replicator.engine.analysis.dataflow import Rules
from replicator.engine.analysis.source_lines import innermost_line, is_transposed

Mark = TypeVar("Mark")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedRules(Rules[Mark]):
    """Rules that know the equations around each that they decide.

    Attributes:
      outer: Calls and loops that hold these equations.
    """

    outer: tuple[core.JaxprEqn, ...] = ()

    def inside(self, eqn: core.JaxprEqn) -> Self:
        """Remember the equation that holds others."""
        return dataclasses.replace(self, outer=(*self.outer, eqn))

    def line_of(self, eqn: core.JaxprEqn) -> str:
        """Return the user's line that made an equation, or one around it."""
        return innermost_line((*self.outer, eqn))

    def is_backward(self, eqn: core.JaxprEqn) -> bool:
        """Return whether an equation is of a backward pass."""
        return is_transposed((*self.outer, eqn))
