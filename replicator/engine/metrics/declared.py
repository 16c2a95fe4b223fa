"""Metrics of a step, declared by how they merge.

A step returns a tree of metrics. Each declares how it merges over microbatches and
replicas: `Mean` (weighted), `Sum`, `Max`, `Min`, `Concat`, `PerReplica`; a plain array
is a `Mean` of equal weights. The caller gets plain arrays, whose dtypes depend on
neither number.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from replicator.base.per_replica import PerReplica
from replicator.base.types import PyTree
from replicator.collectives.all_gather import all_gather
from replicator.collectives.all_reduce import all_reduce
from replicator.collectives.precision import sum_dtype
from replicator.engine.analysis.ordered_bits import ordered_scope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean: `value` of one replica's microbatch counts `weight` times.

    Attributes:
      value: The mean over this replica's examples; any shape.
      weight: Number of its examples (or tokens), a scalar. With `None` every microbatch
        of every replica counts alike.

    >>> def step_fn(state, batch):
    ...     hits = (batch["x"] @ state["params"]["w"] > 0) * batch["mask"]
    ...     return state, {"accuracy": Mean(hits.sum() / batch["mask"].sum(),
    ...                                     weight=batch["mask"].sum())}
    """

    value: jax.Array
    weight: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means:
    """A sum of means, each with a weight of its own, from `value_and_grad`.

    Attributes:
      parts: The means.
    """

    parts: tuple[Mean, ...]

    @property
    def value(self) -> jax.Array:
        """The sum of this replica's means."""
        return _added([part.value for part in self.parts])


def _added(values: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A value that adds up over microbatches and replicas.

    The sum of booleans and integers of fewer than 32 bits is int32, that of half
    precision float32: a sum over a batch would leave their range.
    """

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A value of which the largest counts."""

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Min:
    """A value of which the smallest counts."""

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Concat:
    """One row for each example of a microbatch, [examples, ...]; all rows are kept.

    The result is [global_batch, ...], in the order of the global batch, whole on every
    replica: one gather. It has rows for padding, too, but not in an evaluation.
    """

    value: jax.Array


Metric: TypeAlias = Mean | Means | Sum | Max | Min | Concat | PerReplica


def is_metric(node: PyTree) -> bool:
    """Return whether `node` declares how it merges.

    >>> is_metric(Sum(1.0)), is_metric(1.0)
    (True, False)
    """
    return isinstance(node, Metric)


def declare(metrics: PyTree) -> PyTree:
    """Make every plain leaf of `metrics` a `Mean` of equal weights.

    Means are floats, sums have 32 bits at least: types do not depend on the numbers of
    replicas and microbatches.

    Args:
      metrics: Metrics of a step.

    Returns:
      The tree with every leaf inside a metric. `Concat` and `PerReplica` leaves have a
      new leading axis of microbatches, of length 1.

    >>> declare({"loss": jnp.array(2.0)})["loss"].value.dtype
    dtype('float32')
    """

    def as_metric(node: PyTree) -> Metric:
        match node:
            case Mean(value, None):
                return Mean(_as_float(value))
            case Mean(value, weight):
                return Mean(_as_float(value), _as_weight(weight))  # type: ignore[arg-type]
            case Means(parts):
                return Means(tuple(map(as_metric, parts)))  # type: ignore[arg-type]
            case Sum(value):
                return Sum(_as_sum(value))
            case Max(value) | Min(value):
                return type(node)(jnp.asarray(value))
            case Concat() | PerReplica():
                return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], node)
            case plain:
                return Mean(_as_float(plain))

    return jax.tree.map(as_metric, metrics, is_leaf=is_metric)


def merge_microbatches(metrics: PyTree) -> PyTree:
    """Merge declared metrics whose leaves have a leading microbatch axis.

    `Concat` and `PerReplica` keep that axis: see `rows`.
    """
    return jax.tree.map(_merge_microbatches, metrics, is_leaf=is_metric)


def merge_replicas(metrics: PyTree, *, reduction: str = "fast") -> PyTree:
    """Merge declared metrics over replicas into plain arrays.

    Args:
      metrics: One replica's declared metrics; `Concat` with an axis of microbatches in
        front, `PerReplica` without.
      reduction: As in `all_reduce`: `"ordered"` adds in replica order.

    Returns:
      The tree with each metric replaced by its value, equal on all replicas;
      `PerReplica` ones stay declared.
    """

    def merge(metric: Metric) -> PyTree:
        match metric:
            case Mean(value, weight):
                return all_reduce(value, "mean", weight=weight, reduction=reduction)
            case Means(parts):
                return _added(list(map(merge, parts)))
            case Sum(value):
                return all_reduce(value, "sum", reduction=reduction)
            case Max(value):
                return all_reduce(value, "max")
            case Min(value):
                return all_reduce(value, "min")
            case Concat(value):
                # Microbatch j is the j-th part of the batch, replica r has its r-th.
                rows = all_gather(value).swapaxes(0, 1)
                return rows.reshape(-1, *rows.shape[3:])
            case PerReplica():
                return metric

    with ordered_scope() if reduction == "ordered" else contextlib.nullcontext():
        return jax.tree.map(merge, metrics, is_leaf=is_metric)


def _as_float(leaf: ArrayLike) -> jax.Array:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return array.astype(jnp.float32)


def _as_weight(weight: ArrayLike) -> jax.Array:
    # Not in the dtype of the value: a count of tokens overflows float16.
    array = jnp.asarray(weight)
    return array.astype(float) if jnp.isrealobj(array) else array


def _as_sum(value: ArrayLike) -> jax.Array:
    array = jnp.asarray(value)
    is_small = array.dtype == bool or (
        jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 32
    )
    return array.astype(jnp.int32 if is_small else sum_dtype(array.dtype))


def _merge_microbatches(metric: Metric) -> Metric:
    match metric:
        case Mean(value, None):
            return Mean(value.mean(0))
        case Mean(value, weight):
            weights = jnp.asarray(weight)
            total = weights.sum(0)
            safe = jnp.where(total == 0, jnp.ones_like(total), total)
            wide = value.astype(sum_dtype(value.dtype))
            share = (weights / safe).astype(wide.dtype)
            column = share.reshape(share.shape + (1,) * (value.ndim - share.ndim))
            # A microbatch of padding alone has weight 0, even if NaN; so may all.
            counted = jnp.where(column == 0, jnp.zeros_like(wide), wide * column)
            return Mean(counted.sum(0).astype(value.dtype), total)
        case Means(parts):
            return Means(tuple(map(_merge_microbatches, parts)))  # type: ignore[arg-type]
        case Sum(value):
            return Sum(value.sum(0, dtype=value.dtype))  # int32 in 64-bit mode, too
        case Max(value):
            return Max(value.max(0))
        case Min(value):
            return Min(value.min(0))
        case Concat() | PerReplica():
            return jax.tree.map(lambda leaf: leaf[:, 0], metric)
