"""Add gradients up in float32 at least, and divide the sums by their weights.

Gradients are of means that count alike, of means that count as much as their weight,
or of sums over a count of examples: three ways to the same sums and one division.
Gradients of several sums are kept apart, and added where each is divided by its count.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from replicator.base.per_replica import PerReplica
from replicator.base.trees import describe, first_difference, named_leaves
from replicator.base.types import PyTree
from replicator.collectives.context.axes import at_leaf
from replicator.collectives.markers import mark_given, mark_weighted
from replicator.collectives.ordered import add_in_order
from replicator.collectives.precision import sum_dtype
from replicator.engine.analysis.ordered_bits import ordered_scope
from replicator.engine.step.optimizer_state import (
    Collecting,
    GradientsOfSums,
    OwnSums,
    Reduction,
    Share,
    one_of,
)
from replicator.errors import ArgumentError


class UpdateArguments(NamedTuple):
    """Arguments of one call of a wrapped optimizer's `update`."""

    grads: PyTree
    share: Share
    weight: jax.Array | None  # a scalar, or [sums]; None if all count alike


def checked_given(
    grads: PyTree, weight: ArrayLike | None, count: ArrayLike | None
) -> UpdateArguments:
    """Check the arguments of `update`, and mark them for the proof.

    Raises:
      ArgumentError: A leaf is not floating-point, weight or count is not a scalar, or
        both are given.
    """
    for path, leaf in named_leaves(grads):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ArgumentError(
                f"`grads` must hold floating-point leaves, got {describe(leaf)}"
                f"{at_leaf(path)}. Keep integers out of the parameters."
            )
    if isinstance(grads, GradientsOfSums) and grads.counts is not None:
        if weight is not None or count is not None:
            raise ArgumentError(
                "`count` must be left out with the gradients of several sums, got a "
                "weight or a count. Each of them brings its own."
            )
        parts = tuple(
            mark_given(part, count)
            for part, count in zip(grads.parts, grads.counts, strict=True)
        )
        return UpdateArguments(GradientsOfSums(parts), "count", grads.counts)
    if weight is not None and count is not None:
        raise ArgumentError(
            "`weight` and `count` must not be given together, got both. Pass `count` "
            "with gradients of a sum over examples, `weight` with those of a mean."
        )
    if count is not None:
        scalar = _scalar("count", count)
        return UpdateArguments(mark_given(grads, count), "count", scalar)
    grads = mark_given(grads)
    if weight is None:
        return UpdateArguments(grads, "equal", None)
    scalar = _scalar("weight", weight)
    marked = jax.tree.map(lambda leaf: mark_weighted(leaf, scalar), grads)
    return UpdateArguments(marked, "weight", scalar)


class Valued(NamedTuple):
    """Gradients, and the value of the loss, which is averaged with them."""

    grads: PyTree
    value: jax.Array


def with_value(given: UpdateArguments, value: jax.Array) -> UpdateArguments:
    """Return the arguments with the value of the mean loss of their examples.

    Raises:
      ArgumentError: The gradients are of several sums: the value has no one weight.
    """
    if isinstance(given.grads, GradientsOfSums):
        raise ArgumentError(
            "`value` must be left out with the gradients of several sums, got one: the "
            "sums have counts of their own. Use an optimizer that takes none."
        )
    factor = given.weight if given.share == "count" else None
    return given._replace(grads=Valued(given.grads, scaled(jnp.asarray(value), factor)))


def check_shapes(grads: PyTree, params: PyTree) -> None:
    """Refuse gradients that are not of the parameters: those of single examples.

    Args:
      grads: Gradients of all parameters or of some: a masked one has no leaf.
      params: The parameters, or updates for them.

    Raises:
      ArgumentError: A leaf has another shape than its parameter; names it.
    """
    wanted = dict(named_leaves(params))
    if jax.tree_util.all_leaves([grads]) and "" not in wanted:
        raise ArgumentError(
            f"`grads` must be a tree like the parameters, got {describe(grads)}. Pass "
            "the result of `jax.grad`, or the second one of `jax.value_and_grad`."
        )
    for path, leaf in named_leaves(grads):
        shape = jnp.shape(wanted.get(path, leaf))
        if jnp.shape(leaf) != shape:
            raise ArgumentError(
                f"`grads` must have the shapes of the parameters, got {describe(leaf)} "
                f"for {list(shape)}{at_leaf(path)}: they are averaged before the "
                "optimizer sees them. Clip those of single examples in the step and "
                "pass their sum with `count=n`, or hand `replicator.all_gather(grads, "
                "tiled=True)` to an optimizer outside of the wrap."
            )


def _scalar(name: str, weight: ArrayLike) -> jax.Array:
    array = jnp.asarray(weight)
    if array.ndim != 0 or not jnp.isrealobj(array):
        raise ArgumentError(
            f"`{name}` must be one real number, got {describe(array)}. Pass the number "
            "of examples or tokens behind these gradients, e.g. `mask.sum()`."
        )
    return array.astype(float)


def collect_given(
    pending: Collecting, given: UpdateArguments, reduction: Reduction
) -> Collecting:
    """Return the sums with those of one more microbatch."""
    scalar = jnp.ones(()) if given.weight is None else given.weight
    factor = given.weight if given.share == "weight" else None
    if reduction == "ordered":
        share = scaled(given.grads, factor)
        total = pending.total
        if total is None:
            total = optax.tree.zeros_like(share)
        with ordered_scope():
            total = add_in_order(total, share)
            before = jnp.broadcast_to(pending.weight, scalar.shape)
            weights = add_in_order(before, scalar)
    else:
        total = added(pending.total, given.grads, factor)
        weights = pending.weight + scalar
    return Collecting(
        total=total,
        weight=weights,
        count=pending.count + 1,
        calls=pending.calls + 1,
        share=given.share,
    )


def no_own_sums(params: PyTree, every: int) -> OwnSums:
    """Return sums of nothing for a loop of one's own."""
    zeros = jax.tree.map(
        lambda p: jnp.zeros(jnp.shape(p), sum_dtype(jnp.result_type(p))), params
    )
    return OwnSums(
        total=PerReplica(zeros, on_resize="sum"),
        weight=PerReplica(jnp.zeros(()), on_resize="sum"),
        count=jnp.zeros((), jnp.int32),
        every=every,
    )


def check_own_grads(total: PyTree, grads: PyTree) -> None:
    """Refuse gradients of other parameters than `init` made sums for."""
    difference = first_difference(total, scaled(grads, None))
    if difference is not None:
        raise ArgumentError(
            "`grads` must have the structure of the parameters that `init` was given "
            f"with `wrap_optimizer(accumulate=k)`, got another: {difference}. Pass "
            "`accumulate=k` to `rep.compile` instead."
        )


def added(total: PyTree | None, grads: PyTree, weight: jax.Array | None) -> PyTree:
    """Return `total` plus gradients times their weight."""
    share = scaled(grads, weight)
    return share if total is None else jax.tree.map(jnp.add, total, share)


def scaled(grads: PyTree, factor: jax.Array | None) -> PyTree:
    """Multiply in float32 at least; factor 0 gives 0, also for a NaN.

    >>> scaled(jnp.array([jnp.nan, 2.0]), jnp.array(0.0))
    Array([0., 0.], dtype=float32)
    """
    wide = jax.tree.map(lambda g: g.astype(sum_dtype(jnp.result_type(g))), grads)
    if factor is None:
        return wide
    return jax.tree.map(
        lambda g: jnp.where(factor == 0, jnp.zeros_like(g), g * factor.astype(g.dtype)),
        wide,
    )


def divided(total: PyTree, weight: jax.Array, *, like: PyTree) -> PyTree:
    """Divide sums by their weight, in the dtypes of `like`; add up several.

    >>> divided(jnp.array([6.0]), jnp.array(3.0), like=jnp.array([0.0]))
    Array([2.], dtype=float32)
    """
    # All examples may be padding: then the sums are zero, too.
    safe = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    several = isinstance(total, GradientsOfSums)
    shares = [
        jax.tree.map(lambda g, by=by: g / by.astype(g.dtype), part)
        for part, by in (
            zip(total.parts, safe, strict=True) if several else [(total, safe)]
        )
    ]
    mean = functools.reduce(functools.partial(jax.tree.map, jnp.add), shares)
    return optax.tree.cast_like(mean, one_of(like))
