"""Tell which results of a step may differ between two ways to round, and be right.

A result is compared unless it follows, by its value, from something that a rounding can
turn over. Before the backward pass that is a comparison, a sort, a rounding or an index
of the largest of what was rounded: an accuracy, a queue of sorted indices. What only
chooses between values that are near each other there (a `relu`, a mask) is none. With
the backward pass this begins anew: gradients are always compared. Behind it it is the
sign of a gradient, too, and a quotient by it: Adam makes ± its rate of a gradient that
is nothing but rounding. A quotient by a scalar of more gradients than the one that is
divided is none: a clip by the global norm.

The backward pass is known by the name scope that JAX gives it. What finds gradients
otherwise (forward mode, formulas by hand) is treated as the forward pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from replicator.engine.analysis.dataflow import Rules, flow, sub_jaxprs


class Mark(NamedTuple):
    """What is known of a value.

    Attributes:
      varies: Whether it follows from floats of state or batch.
      turns: Whether a rounding may turn it over.
      gradients: Those that it follows from, by number.
    """

    varies: bool = False
    turns: bool = False
    gradients: frozenset[int] = frozenset()


_STEPS = frozenset(
    {
        *("lt", "le", "gt", "ge", "eq", "ne", "lt_to", "le_to", "eq_to"),
        *("argmax", "argmin", "sort", "top_k", "approx_top_k"),
        *("round", "floor", "ceil", "sign", "rem", "reduce_precision"),
        *("rng_bit_generator", "rng_uniform"),
    }
)
_QUOTIENTS = frozenset(
    {
        *("rsqrt", "pow", "log", "log1p", "atan2", "cbrt", "eigh", "eig", "svd", "qr"),
        *("geqrf", "cholesky", "lu", "triangular_solve", "schur", "hessenberg"),
    }
)


def comparable(
    jaxpr: core.Jaxpr, given: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Return per result whether it is compared, and whether it shows gradients.

    Args:
      jaxpr: Of a step.
      given: Per input whether it belongs to state or batch.
    """
    marks = [
        Mark(varies=is_given and _is_float(var))
        for var, is_given in zip(jaxpr.invars, given, strict=True)
    ]
    shown = [each.gradients for each in flow(jaxpr, marks, _Rounding())]
    found = flow(jaxpr, marks, _Rounding(frozenset().union(*shown)))
    compared = [
        _is_float(var) and not mark.turns
        for var, mark in zip(jaxpr.outvars, found, strict=True)
    ]
    return compared, [bool(mark.gradients) for mark in found]


class _Rounding(Rules[Mark]):
    clean = Mark()

    def __init__(self, everything: frozenset[int] = frozenset()) -> None:
        self._everything = everything  # the gradients that results follow from

    def join(self, marks: Sequence[Mark]) -> Mark:
        return Mark(
            varies=any(mark.varies for mark in marks),
            turns=any(mark.turns for mark in marks),
            gradients=frozenset().union(*(mark.gradients for mark in marks)),
        )

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[Mark]
    ) -> Sequence[Mark] | None:
        name = eqn.primitive.name
        if "transpose(" in str(eqn.source_info.name_stack):
            # A variable is the same object at each walk through a loop.
            return [Mark(True, gradients=frozenset({id(x)})) for x in eqn.outvars]
        if name == "select_n":
            chosen = self.join(marks[1:])
            # Between numbers that are the same everywhere the choice is all there is.
            return [chosen if chosen.varies else self.join(marks)]
        if sub_jaxprs(eqn) and not name.startswith(("scatter", "reduce", "cum")):
            return None
        mark = self.join(marks)
        if name == "div" and self._is_common(eqn, marks):
            mark = mark._replace(gradients=marks[0].gradients)
        elif _is_turned(eqn, marks):
            mark = mark._replace(turns=True)
        return [mark] * len(eqn.outvars)

    def _is_common(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> bool:
        """Tell whether one number, of more gradients than one, divides."""
        over, under = (mark.gradients for mark in marks)
        if getattr(eqn.invars[1].aval, "ndim", 0) or not under:
            return False
        more = under > over and len(under) > 1
        return more or under >= self._everything > frozenset()


def _is_turned(eqn: core.JaxprEqn, marks: Sequence[Mark]) -> bool:
    name = eqn.primitive.name
    floats = [mark for mark, x in zip(marks, eqn.invars, strict=True) if _is_float(x)]
    varies = any(mark.varies for mark in floats)
    if name in _STEPS or name == "convert_element_type":
        return varies and (name in _STEPS or not _is_float(eqn.outvars[0]))
    if name == "div":
        return bool(marks[1].gradients)
    is_quotient = name in _QUOTIENTS or (name == "integer_pow" and eqn.params["y"] < 0)
    return is_quotient and any(mark.gradients for mark in marks)


def _is_float(atom: core.Var | core.Literal) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))
