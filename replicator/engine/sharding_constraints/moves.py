"""Follow the dimensions of an array through operations that only move or add up."""

from typing import Any

from jax.extend import core

from replicator.collectives.markers import ALONE, MARKERS
from replicator.engine.analysis.dataflow import shape_of
from replicator.strategies.rule import Cut

_ELEMENTWISE = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "rem", "neg", "sign", "abs", "max"),
        *("min", "pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "exp"),
        *("exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "sin", "cos"),
        *("floor", "ceil", "round", "nextafter", "clamp", "select_n", "and", "or"),
        *("not", "xor", "eq", "ne", "lt", "le", "gt", "ge", "is_finite", "copy"),
        *("stop_gradient", "convert_element_type", "reduce_precision", "copy_p"),
        *("atan2", ALONE, *MARKERS),
    }
)
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
)


def is_elementwise(eqn: core.JaxprEqn) -> bool:
    """Return whether each element of the result follows from those at its position."""
    if eqn.primitive.name not in _ELEMENTWISE:
        return False
    shape = shape_of(eqn.outvars[0])
    return all(shape_of(atom) in (shape, ()) for atom in eqn.invars)


def is_reduction(eqn: core.JaxprEqn) -> bool:
    """Return whether pieces are reduced where they are: a norm needs no whole array."""
    return eqn.primitive.name in _REDUCTIONS


def forward(eqn: core.JaxprEqn, cut: Cut) -> Cut | None:
    """Return the cut of the result if `cut` is that of the first operand.

    Returns:
      None if the operation is not known to only move dimensions.
    """
    name = eqn.primitive.name
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name == "transpose":
        return tuple(cut[dimension] for dimension in eqn.params["permutation"])
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(before, after, cut)
    if name in ("slice", "dynamic_slice"):
        return _if_uncut(before, after, cut)
    return None


def backward(eqn: core.JaxprEqn, atom: Any, cut: Cut) -> Cut | None:
    """Return the cut of the operand `atom` for a result with the cut `cut`."""
    if is_elementwise(eqn):
        return cut if shape_of(atom) == shape_of(eqn.outvars[0]) else None
    name = eqn.primitive.name
    before, after = shape_of(atom), shape_of(eqn.outvars[0])
    if name == "transpose":
        places = eqn.params["permutation"]
        return tuple(cut[places.index(dimension)] for dimension in range(len(places)))
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(after, before, cut)
    if name == "pad" and atom is eqn.invars[0]:
        # A shift keeps the size, and moves the values.
        padding = zip(cut, eqn.params["padding_config"], strict=True)
        return None if any(axis and any(each) for axis, each in padding) else cut
    return None


def _if_uncut(before: tuple, after: tuple, cut: Cut) -> Cut | None:
    triples = zip(before, after, cut, strict=True)
    return cut if all(a == b or axis is None for a, b, axis in triples) else None


def _reshaped(before: tuple, after: tuple, cut: Cut) -> Cut | None:
    """Follow dimensions through a reshape that merges or splits them.

    Dimensions are taken in blocks of equal products. In a block whose first dimension
    is cut, the pieces are those of the first dimension of the other block.
    """
    found: list[str | None] = [None] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first, other = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif right < left and j < len(after):
                right, j = right * after[j], j + 1
            else:
                return None
        # Dimensions of one element belong to no block, and may come before it.
        own = [d for d in range(first, i) if before[d] != 1]
        others = [d for d in range(other, j) if after[d] != 1]
        if any(cut[d] is not None for d in own[1:]):
            return None
        if own and cut[own[0]] is not None:
            if not others:
                return None
            found[others[0]] = cut[own[0]]
    return tuple(found)
