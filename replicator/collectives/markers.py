"""Name values inside a traced step, so that a walk over its jaxpr can recognise them.

Each marker is a primitive that returns its first operand unchanged. The compiler never
sees it, gradients pass through, and the marker is not applied to them.
"""

from contextlib import AbstractContextManager

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike
from jaxtyping import Array, Shaped

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree

LOCAL_SUM = "local_sum"
"""Marks a loss that must be a sum over this replica's own examples; the second operand
is their number."""

ALONE = "alone"
"""Marks the result of the collective `name` where there is one replica."""

GLOBAL = "global"
"""Marks values that all replicas must use alike: parameters of a common loss,
cotangents."""

WEIGHTED_GRADIENT = "weighted_gradient"
"""Marks a gradient of a mean; the second operand is the weight of that mean."""

GIVEN_GRADIENT = "given_gradient"
"""Marks a gradient that `update` is given; the second operand, if there is one, is the
count of the sum that it is of."""

MOVED_AVERAGE = "moved_average"
"""Marks running statistics that were moved; the second operand is their old value."""

REDUCED_GRADIENT = "reduced_gradient"
"""Marks a gradient that an optimizer gets; the parameter `name` is its path."""


NORM = "replicator_norm"
"""Name scope of the collectives of a norm of ours."""


def norm_scope() -> AbstractContextManager:
    """Mark the collectives traced in this block as those of a norm."""
    return jax.named_scope(NORM)


def make_marker(name: str, *, operands: int = 1) -> Primitive:
    """Return a primitive called `name` that returns the first of its `operands`."""
    marker = Primitive(name)
    marker.def_impl(lambda leaf, *_, **__: leaf)
    marker.def_abstract_eval(lambda aval, *_, **__: aval)
    ad.defjvp(marker, lambda tangent, *_, **__: tangent, *[None] * (operands - 1))

    def batch(operands: tuple, dimensions: tuple, **params: str) -> tuple:
        return marker.bind(*operands, **params), dimensions[0]

    batching.primitive_batchers[marker] = batch
    mlir.register_lowering(marker, lambda _, value, *__, **___: [value])
    return marker


def mark_local_sum(total: Shaped[Array, ""], count: ArrayLike) -> Shaped[Array, ""]:
    """Return `total`, marked as a sum over `count` examples of this replica alone."""
    return _local_sum_p.bind(total, count)


def mark_alone(leaf: Shaped[Array, "*shape"], name: str) -> Shaped[Array, "*shape"]:
    """Return `leaf`, marked as the result of the collective `name` on one replica."""
    return _alone_p.bind(leaf, name=name)


def mark_global(tree: PyTree) -> PyTree:
    """Return a tree, each leaf marked as one that all replicas must use alike."""
    return jax.tree.map(_global_p.bind, tree)


def mark_weighted(gradient: PyTree, weight: Shaped[Array, ""]) -> PyTree:
    """Return one leaf of a gradient, marked as that of a mean over `weight`."""
    return _weighted_gradient_p.bind(gradient, weight)


def mark_given(gradients: PyTree, count: ArrayLike | None = None) -> PyTree:
    """Return gradients, each leaf marked as one that `update` is given."""
    if count is None:
        return jax.tree.map(_given_mean_p.bind, gradients)
    return jax.tree.map(lambda leaf: _given_sum_p.bind(leaf, count), gradients)


def mark_moved(moved: Shaped[Array, "..."], old: Array) -> Shaped[Array, "..."]:
    """Return running statistics, marked as moved from `old` in this call of a norm."""
    return _moved_average_p.bind(moved, old)


def mark_reduced(gradients: PyTree, name: str) -> PyTree:
    """Return gradients of `name`, each leaf marked as one that its optimizer gets."""
    leaves, treedef = jax.tree.flatten(gradients)
    paths = [path for path, _ in named_leaves(gradients)]
    return treedef.unflatten(
        _reduced_gradient_p.bind(leaf, name=f"{name}/{path}" if path else name)
        for leaf, path in zip(leaves, paths, strict=True)
    )


_local_sum_p = make_marker(LOCAL_SUM, operands=2)
_global_p = make_marker(GLOBAL)
_alone_p = make_marker(ALONE)
# A cotangent passes between replicas, too, where there are several.
ad.deflinear2(_alone_p, lambda cotangent, _, name: [mark_alone(cotangent, name)])
_weighted_gradient_p = make_marker(WEIGHTED_GRADIENT, operands=2)
_given_mean_p = make_marker(GIVEN_GRADIENT)
_given_sum_p = make_marker(GIVEN_GRADIENT, operands=2)
_moved_average_p = make_marker(MOVED_AVERAGE, operands=2)
_reduced_gradient_p = make_marker(REDUCED_GRADIENT)

MARKERS = frozenset(
    {
        *(LOCAL_SUM, GLOBAL, WEIGHTED_GRADIENT, GIVEN_GRADIENT, REDUCED_GRADIENT),
        *(MOVED_AVERAGE, "assume_replicated"),
    }
)
"""Names of the markers that do not concern other replicas where there is one."""
