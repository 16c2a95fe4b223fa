"""Join rows per example of microbatches, so that the cut does not show.

A metric that merges, such as a `Mean`, is refused if it has a row per example: row i of
one replica's examples has nothing to do with row i of another's.

One microbatch does not show whether an array has a row per example: a vector may happen
to be as long. So the step is traced once more, with the whole batch of a replica at
once, and metrics get the shapes that they have there.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicator.base.per_replica import PerReplica
from replicator.base.trees import describe, leaf_path, named_leaves
from replicator.base.types import PyTree
from replicator.engine.metrics.declared import Concat, is_metric
from replicator.errors import ArgumentError


def join_rows(
    metrics: PyTree, step: Callable[..., tuple], given: tuple, *, cut: bool
) -> PyTree:
    """Check rows per example, and join those of `PerReplica` metrics.

    A `PerReplica` leaf with a row per example gets the rows of all microbatches, in
    order. Floats of other leaves are averaged over microbatches; integers and booleans
    are those of the last.

    Args:
      metrics: Declared metrics; `Concat` and `PerReplica` have an axis of microbatches
        in front.
      step: Runs over one microbatch; its second result is declared metrics.
      given: The state, the batch of a replica, and the other arguments of `step`.
      cut: Whether leaves of that batch have an axis of microbatches in front.

    Returns:
      The metrics; `PerReplica` leaves have the shapes that the whole batch gives them.

    Raises:
      ArgumentError: Rows are not one per example; names the metric.
    """
    kept = list(filter(_may_have_rows, jax.tree.leaves(metrics, is_leaf=is_metric)))
    if not kept:
        return metrics
    may_grow = cut and any(leaf.ndim > 1 for leaf in jax.tree.leaves(kept))
    state, batch, *rest = given
    examples, shapes = _examples(batch, cut=cut), metrics
    if may_grow:
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        described = f"the {examples} examples of a replica at once"
        shapes = _shapes(step, state, batch, *rest, what=described)

    def join(path: tuple, metric: PyTree, like: PyTree) -> PyTree:
        if isinstance(metric, Concat):
            _check_rows(leaf_path(path), metric.value, like.value, examples)
        if not isinstance(metric, PerReplica):
            return metric
        return jax.tree.map(lambda *of: _own(leaf_path(path), *of), metric, like)

    return jax.tree_util.tree_map_with_path(join, metrics, shapes, is_leaf=is_metric)


def refuse_rows(
    metrics: PyTree, step: Callable[..., tuple], given: tuple, *, cut: bool
) -> None:
    """Refuse rows per example in metrics that merge with those of other examples.

    Args:
      metrics: Declared metrics of one microbatch.
      step: As in `join_rows`, which has the other two, too.
      given: Likewise.
      cut: Likewise.

    Raises:
      ArgumentError: There are; names the metric.
    """
    named = named_leaves(metrics, is_leaf=is_metric)
    state, batch, *rest = given
    examples = next((x.shape[int(cut)] for x in jax.tree.leaves(batch)), 0)
    if not any(_has_rows(metric, examples) for _, metric in named):
        return
    doubled = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2 * examples, *x.shape[1 + cut :]), x.dtype),
        batch,
    )
    described = f"twice the examples of a microbatch, {2 * examples}"
    others = jax.tree.leaves(
        _shapes(step, state, doubled, *rest, what=described), is_leaf=is_metric
    )
    for (path, metric), other in zip(named, others, strict=True):
        if _has_rows(metric, examples) and _has_rows(other, 2 * examples):
            raise ArgumentError(
                f"`step_fn` must reduce `{path}` over its examples, got "
                f"{describe(metric.value)} for {examples} of them: rows of other "
                "examples would be merged with these. Report their mean, or all rows: "
                "`Concat(rows)`."
            )


def _has_rows(metric: PyTree, examples: int) -> bool:
    if isinstance(metric, Concat | PerReplica):
        return False
    return jnp.shape(metric.value)[:1] == (examples,)


def _shapes(
    step: Callable, state: PyTree, batch: PyTree, *rest: PyTree, what: str
) -> PyTree:
    """Return the shapes of the metrics of another batch, described by `what`."""
    try:
        return jax.eval_shape(step, state, batch, *rest)[1]
    except Exception as failure:
        failure.add_note(
            f"`step_fn` was traced with {what}, to see which metrics have one row per "
            "example."
        )
        raise


def _examples(batch: PyTree, *, cut: bool) -> int:
    leaf = next(iter(jax.tree.leaves(batch)), jnp.zeros(0))
    return math.prod(leaf.shape[: 1 + int(cut)])


def _may_have_rows(metric: PyTree) -> bool:
    return isinstance(metric, Concat | PerReplica)


def _check_rows(path: str, rows: jax.Array, like: jax.Array, examples: int) -> None:
    microbatches, *shape = rows.shape
    has_rows = bool(shape) and microbatches * shape[0] == examples
    if not has_rows or like.shape[1:] != (examples, *shape[1:]):
        raise ArgumentError(
            f"`step_fn` must report one row per example for `{path}`, a `Concat`, got "
            f"{describe(rows[0])} for {examples // microbatches} examples. Declare it "
            "as `Mean`, `Sum`, `Max` or `Min`."
        )


def _own(path: str, leaf: jax.Array, like: jax.Array) -> jax.Array:
    """Merge one array over microbatches: into rows, a mean, or the last."""
    microbatches, *shape = leaf.shape
    wanted = like.shape[1:]
    if wanted == tuple(shape):
        is_number = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return leaf.mean(0) if is_number and microbatches > 1 else leaf[-1]
    if shape and wanted == (microbatches * shape[0], *shape[1:]):
        return leaf.reshape(wanted)
    raise ArgumentError(
        f"`step_fn` must report `{path}`, a `PerReplica`, in one shape or with one row "
        f"per example, got {describe(leaf[0])} of a microbatch and "
        f"{describe(jax.ShapeDtypeStruct(wanted, leaf.dtype))} of the whole batch. Put "
        "the axis of examples first."
    )
