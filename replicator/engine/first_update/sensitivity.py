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
      level: 0 if it is the same everywhere, 1 if it is an array that the step was given
        or a part of it, 2 if it was computed, and rounded.
      turns: Whether a rounding may turn it over.
      gradients: Those that it follows from, by number.
    """

    level: int = 0
    turns: bool = False
    gradients: frozenset[int] = frozenset()


_GIVEN = Mark(level=1)
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
_MOVES = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "copy"),
        *("slice", "dynamic_slice", "gather", "concatenate", "pad", "rev", "scatter"),
        *("dynamic_update_slice", "select_n", "convert_element_type", "stop_gradient"),
        *("neg", "abs", "max", "min", "clamp", "reduce_max", "reduce_min", "split"),
        *("copy_p", "sharding_constraint", "optimization_barrier", "device_put"),
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
        _GIVEN if is_given and _is_float(var) else Mark()
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
        joined = Mark()
        for mark in marks:
            if mark != joined:
                joined = Mark(
                    level=max(joined.level, mark.level),
                    turns=joined.turns or mark.turns,
                    gradients=joined.gradients | mark.gradients,
                )
        return joined

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[Mark]
    ) -> Sequence[Mark] | None:
        name = eqn.primitive.name
        if "transpose(" in str(eqn.source_info.name_stack):
            # A variable is the same object at each walk through a loop.
            return [Mark(2, gradients=frozenset({id(var)})) for var in eqn.outvars]
        if name == "select_n":
            return [self._chosen(marks[0], self.join(marks[1:]))]
        if sub_jaxprs(eqn) and not name.startswith(("scatter", "reduce", "cum")):
            return None
        mark = self.join(marks)
        if name == "div" and self._is_common(eqn, marks):
            mark = mark._replace(gradients=marks[0].gradients)
        elif self._is_turned(eqn, marks, mark.level == 2):
            mark = mark._replace(turns=True)
        if mark.level and name not in _MOVES:
            mark = mark._replace(level=2)
        return [mark] * len(eqn.outvars)

    def _is_common(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> bool:
        """Tell whether one number, of more gradients than one, divides."""
        over, under = (mark.gradients for mark in marks)
        if getattr(eqn.invars[1].aval, "ndim", 0) or not under:
            return False
        more = under > over and len(under) > 1
        return more or under >= self._everything > frozenset()

    def _chosen(self, way: Mark, chosen: Mark) -> Mark:
        # Where both are as they were given, the choice is all that is in the result.
        if way.turns and chosen.level < 2:
            return self.join([way, chosen])
        return chosen

    def _is_turned(
        self, eqn: core.JaxprEqn, marks: Sequence[Mark], is_rounded: bool
    ) -> bool:
        name, pairs = eqn.primitive.name, zip(eqn.invars, marks, strict=True)
        if name in _STEPS:
            return is_rounded and any(m.level and _is_float(x) for x, m in pairs)
        if name == "convert_element_type":
            into = _is_float(eqn.outvars[0])
            return is_rounded and _is_float(eqn.invars[0]) and not into
        if name == "integer_pow" and eqn.params["y"] > 0:
            return False
        if name == "div":
            return bool(marks[1].gradients)
        quotient = name in _QUOTIENTS or name == "integer_pow"
        return quotient and any(mark.gradients for mark in marks)


def _is_float(atom: core.Var | core.Literal) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))
