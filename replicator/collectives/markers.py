"""Name values inside a traced step, so that a walk over its jaxpr can recognise them.

Each marker is a primitive that returns its first operand unchanged. The compiler never
sees it, gradients pass through, and the marker is not applied to them.
"""

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped

from replicator.protocols import PyTree

LOCAL_SUM = "local_sum"
"""Marks a loss that must be a sum over this replica's own examples."""

WEIGHTED_GRADIENT = "weighted_gradient"
"""Marks a gradient of a mean; the second operand is the weight of that mean."""


def make_marker(name: str, *, operands: int) -> Primitive:
    """Return a primitive called `name` that returns the first of its `operands`."""
    marker = Primitive(name)
    marker.def_impl(lambda leaf, *_: leaf)
    marker.def_abstract_eval(lambda aval, *_: aval)
    ad.defjvp(marker, lambda tangent, *_: tangent, *[None] * (operands - 1))

    def batch(operands: tuple, dimensions: tuple) -> tuple:
        return marker.bind(*operands), dimensions[0]

    batching.primitive_batchers[marker] = batch
    mlir.register_lowering(marker, lambda _, value, *__: [value])
    return marker


def mark_local_sum(total: Shaped[Array, ""]) -> Shaped[Array, ""]:
    """Return `total`, marked as a sum over the examples of this replica alone."""
    return _local_sum_p.bind(total)


def mark_weighted(gradient: PyTree, weight: Shaped[Array, ""]) -> PyTree:
    """Return one leaf of a gradient, marked as that of a mean over `weight`."""
    return _weighted_gradient_p.bind(gradient, weight)


_local_sum_p = make_marker(LOCAL_SUM, operands=1)
_weighted_gradient_p = make_marker(WEIGHTED_GRADIENT, operands=2)
