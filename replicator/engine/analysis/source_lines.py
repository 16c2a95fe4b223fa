"""Find the user's own line behind an equation of a jaxpr; rules that know it."""

import dataclasses
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Self, TypeVar

from jax.extend import core

from replicator.base.tracebacks import is_library
from replicator.engine.analysis.dataflow import Rules

UNKNOWN_LINE = "an unknown line"
Mark = TypeVar("Mark")


def user_line(eqn: core.JaxprEqn, *, caller: str = UNKNOWN_LINE) -> str:
    """Return the user's line that made `eqn`: the first frame outside libraries.

    Args:
      eqn: Any equation.
      caller: Line of the call that holds `eqn`. JAX traces a jitted function of its own
        (`jnp.where`, `jax.random.normal`) once for all its callers, so equations in
        there have no line of the user.

    Returns:
      For example "train.py:12 in step_fn".
    """
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not is_library(frame.file_name):
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{frame.file_name}:{frame.line_num} in {function}"
    return caller


def innermost_line(eqns: Sequence[core.JaxprEqn]) -> str:
    """Return the user's line of the last of equations that hold each other."""
    line = UNKNOWN_LINE
    for each in eqns:
        line = user_line(each, caller=line)
    return line


def is_transposed(eqns: Sequence[core.JaxprEqn]) -> bool:
    """Return whether the last of equations in each other is of a backward pass."""
    scopes = [str(each.source_info.name_stack) for each in eqns]
    again = any("rematted_computation" in scope for scope in scopes)
    return not again and any("transpose(" in scope for scope in scopes)


def user_stacklevel() -> int:
    """Return the `stacklevel` at which `warnings.warn` points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def user_line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's on a stack, as `user_line` does.

    >>> user_line_of(None)
    'an unknown line'
    """
    frame = user_frame_of(frame)
    if frame is None:
        return UNKNOWN_LINE
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def user_frame_of(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's on a stack."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


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
