"""Find the results of a step that may differ between two ways to round, and be right.

A result is compared unless it follows, by its value, from one that a rounding can turn
over. Before the backward pass that is a comparison, an order, a rounding or an index of
the largest of rounded numbers: an accuracy, a queue of sorted indices. A choice between
values that are near each other there (a `relu`, a mask, sorted values themselves) does
not count. With the backward pass this begins anew: gradients are always compared. After
it the sign of a gradient counts, too, and a quotient by it: Adam makes ± its rate of a
gradient that is nothing but rounding. A clip does not count: a quotient by one number
of more gradients than the one that is divided, or by a number with a lower bound, or
a quotient with an upper bound.

The backward pass is known by the name scope that JAX gives it. Gradients found
otherwise (forward mode, formulas by hand) are treated as the forward pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from replicator.engine.analysis.dataflow import Rules, flow, sub_jaxprs


class RoundingMark(NamedTuple):
    """Facts about a value.

    Attributes:
      varies: Whether it follows from floats of state or batch.
      turns: Kind of value that a rounding may turn over in it: `_NOTHING`, `_QUOTIENT`
        or `_STEP`.
      gradients: Gradients that it follows from, by number.
      is_least: Whether it is at least some number that follows from no gradient.
    """

    varies: bool = False
    turns: int = 0
    gradients: frozenset[int] = frozenset()
    is_least: bool = False


_NOTHING, _QUOTIENT, _STEP = range(3)
_LEAST = 1e-3  # a smaller number only avoids a zero

_STEPS = frozenset(
    {
        *("lt", "le", "gt", "ge", "eq", "ne", "lt_to", "le_to", "eq_to"),
        *("argmax", "argmin", "approx_top_k"),
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
_SAME = frozenset(
    {
        *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"),
        *("convert_element_type", "copy"),
    }
)


def comparable(
    jaxpr: core.Jaxpr, given: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Return per result whether it is compared, and whether it shows gradients.

    Args:
      jaxpr: Program of a step.
      given: Per input whether it belongs to state or batch.

    >>> jaxpr = jax.make_jaxpr(lambda x: (2.0 * x, x > 1.0))(jnp.ones(3)).jaxpr
    >>> comparable(jaxpr, [True])
    ([True, False], [False, False])
    """
    marks = [
        RoundingMark(varies=is_given and _is_float(var))
        for var, is_given in zip(jaxpr.invars, given, strict=True)
    ]
    shown = [each.gradients for each in flow(jaxpr, marks, _Rounding())]
    found = flow(jaxpr, marks, _Rounding(frozenset().union(*shown)))
    compared = [
        _is_float(var) and not mark.turns
        for var, mark in zip(jaxpr.outvars, found, strict=True)
    ]
    return compared, [bool(mark.gradients) for mark in found]


class _Rounding(Rules[RoundingMark]):
    clean = RoundingMark()

    def __init__(self, everything: frozenset[int] = frozenset()) -> None:
        self._everything = everything  # the gradients that results follow from

    def join(self, marks: Sequence[RoundingMark]) -> RoundingMark:
        return RoundingMark(
            varies=any(mark.varies for mark in marks),
            turns=max((mark.turns for mark in marks), default=_NOTHING),
            gradients=frozenset().union(*(mark.gradients for mark in marks)),
        )

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[RoundingMark]
    ) -> Sequence[RoundingMark] | None:
        name = eqn.primitive.name
        if "transpose(" in str(eqn.source_info.name_stack):
            # A variable is the same object at each walk through a loop.
            return [
                RoundingMark(True, gradients=frozenset({id(x)})) for x in eqn.outvars
            ]
        if name == "select_n":
            chosen = self.join(marks[1:])
            # Between numbers that are the same everywhere only the choice counts.
            return [chosen if chosen.varies else self.join(marks)]
        if sub_jaxprs(eqn) and not name.startswith(("scatter", "reduce", "cum")):
            return None
        mark = self.join(marks)
        if name in _SAME:
            mark = mark._replace(is_least=marks[0].is_least)
        if name in ("sort", "top_k"):
            keys = self.join(marks[: eqn.params.get("num_keys", 1)])
            order = mark._replace(turns=_STEP if keys.varies else mark.turns)
            return [keys, *[order] * (len(eqn.outvars) - 1)]
        if name in ("max", "min") and (number := _bound(eqn, marks)) is not None:
            if name == "max":
                mark = mark._replace(is_least=number >= _LEAST)
            elif mark.turns == _QUOTIENT:
                mark = mark._replace(turns=_NOTHING)
        elif name == "div" and self._is_common(eqn, marks):
            mark = mark._replace(gradients=marks[0].gradients)
        else:
            mark = mark._replace(turns=max(mark.turns, _turned(eqn, marks)))
        return [mark] * len(eqn.outvars)

    def _is_common(self, eqn: core.JaxprEqn, marks: Sequence[RoundingMark]) -> bool:
        """Return whether one number, of more gradients than one, divides."""
        over, under = (mark.gradients for mark in marks)
        if getattr(eqn.invars[1].aval, "ndim", 0) or not under:
            return False
        more = under > over and len(under) > 1
        return more or under >= self._everything > frozenset()


def _turned(eqn: core.JaxprEqn, marks: Sequence[RoundingMark]) -> int:
    name = eqn.primitive.name
    floats = [mark for mark, x in zip(marks, eqn.invars, strict=True) if _is_float(x)]
    is_cast = name == "convert_element_type" and not _is_float(eqn.outvars[0])
    if is_cast or name in _STEPS:
        return _STEP if any(mark.varies for mark in floats) else _NOTHING
    is_power = name == "integer_pow" and eqn.params["y"] < 0
    if name == "div":
        marks = [] if marks[1].is_least else marks[1:]
    elif name not in _QUOTIENTS and not is_power:
        return _NOTHING
    return _QUOTIENT if any(mark.gradients for mark in marks) else _NOTHING


def _bound(eqn: core.JaxprEqn, marks: Sequence[RoundingMark]) -> float | None:
    """Return the number that gradients are bounded by; None if they are not.

    1 stands for one that is not known before the step runs.
    """
    for atom, mark, other in zip(eqn.invars, marks, marks[::-1], strict=True):
        if other.gradients and not mark.gradients:
            known = atom.val if isinstance(atom, core.Literal) else 1.0
            return float(known) if jnp.ndim(known) == 0 else 1.0
    return None


def _is_float(atom: core.Var | core.Literal) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))
