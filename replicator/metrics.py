"""Numbers that a step reports, with the word for how they merge.

A step returns a tree of metrics. Each says how it merges over microbatches and
replicas: `Mean` (weighted), `Sum`, `Max`, `PerReplica`; a plain array is a `Mean` of
equal weights. What comes back has the same types for 1 and N devices: plain arrays.
"""

import contextlib
import dataclasses
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from replicator.collectives.all_reduce import all_reduce
from replicator.ordered_bits import ordered_scope
from replicator.per_replica import PerReplica
from replicator.protocols import PyTree


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "weight"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean: `value` of one replica's microbatch counts `weight` times.

    Attributes:
      value: The mean over this replica's examples; any shape.
      weight: How many examples (or tokens) stand behind it; a scalar. `None` counts
        every microbatch of every replica alike.
    """

    value: jax.Array
    weight: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Sum:
    """A value that adds up over microbatches and replicas."""

    value: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Max:
    """A value of which the largest counts."""

    value: jax.Array


Metric: TypeAlias = Mean | Sum | Max | PerReplica


def is_metric(node: PyTree) -> bool:
    """Tell whether `node` says how it merges."""
    return isinstance(node, Mean | Sum | Max | PerReplica)


def declare(metrics: PyTree) -> PyTree:
    """Make every plain leaf of `metrics` a `Mean` of equal weights.

    Means come in floats, counts of booleans in integers: types do not depend on how
    many replicas and microbatches there are.

    Args:
      metrics: What a step reported.

    Returns:
      The tree with every leaf inside a metric.
    """

    def as_metric(node: PyTree) -> Metric:
        match node:
            case Mean(value, None):
                return Mean(_as_float(value))
            case Mean(value, weight):
                return Mean(_as_float(value), _as_float(weight))  # type: ignore[arg-type]
            case Sum(value) if jnp.asarray(value).dtype == bool:
                return Sum(jnp.asarray(value).astype(jnp.int32))
            case Sum(value):
                return Sum(jnp.asarray(value))
            case Max(value):
                return Max(jnp.asarray(value))
            case PerReplica(value, on_resize):
                return PerReplica(jax.tree.map(_as_float, value), on_resize)
            case plain:
                return Mean(_as_float(plain))

    return jax.tree.map(as_metric, metrics, is_leaf=is_metric)


def merge_microbatches(metrics: PyTree) -> PyTree:
    """Merge declared metrics whose leaves have a leading microbatch axis."""
    return jax.tree.map(_merge_microbatches, metrics, is_leaf=is_metric)


def merge_replicas(metrics: PyTree, *, reduction: str = "fast") -> PyTree:
    """Merge declared metrics over replicas; leaves come back as plain arrays.

    Args:
      metrics: One replica's declared metrics.
      reduction: As in `all_reduce`: `"ordered"` adds in replica order.

    Returns:
      The tree with each metric replaced by its value, equal on all replicas;
      `PerReplica` ones stay declared.
    """

    def merge(metric: Metric) -> PyTree:
        match metric:
            case Mean(value, weight):
                return all_reduce(value, "mean", weight=weight, reduction=reduction)
            case Sum(value):
                return all_reduce(value, "sum", reduction=reduction)
            case Max(value):
                return all_reduce(value, "max")
            case PerReplica():
                return metric

    with ordered_scope() if reduction == "ordered" else contextlib.nullcontext():
        return jax.tree.map(merge, metrics, is_leaf=is_metric)


def _as_float(leaf: ArrayLike) -> jax.Array:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return array.astype(jnp.float32)


def _merge_microbatches(metric: Metric) -> Metric:
    match metric:
        case Mean(value, None):
            return Mean(value.mean(0))
        case Mean(value, weight):
            weights = jnp.asarray(weight).astype(value.dtype)
            total = weights.sum(0)
            column = weights.reshape(weights.shape + (1,) * (value.ndim - weights.ndim))
            # A microbatch of padding alone weighs nothing, be it NaN; so may all do.
            counted = jnp.where(column == 0, jnp.zeros_like(value), value * column)
            safe = jnp.where(total == 0, jnp.ones_like(total), total)
            return Mean(counted.sum(0) / safe, total)
        case Sum(value):
            return Sum(value.sum(0))
        case Max(value):
            return Max(value.max(0))
        case PerReplica(value, on_resize):
            means = jax.tree.map(lambda leaf: leaf.mean(0), value)
            return PerReplica(means, on_resize)
