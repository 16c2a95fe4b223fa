"""Sum of one gradient over replicas by a method, and what a replica owes of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from replicator.collectives.context.axes import Axis
from replicator.collectives.precision import on_wire, sum_dtype, wire_dtype
from replicator.collectives.synchronise.hierarchical import hierarchical_sum
from replicator.collectives.synchronise.method import SumMethod, rows_shrink, shrinks
from replicator.collectives.synchronise.owned_sum import owned_sum
from replicator.collectives.synchronise.power_sgd import low_rank_sum
from replicator.collectives.synchronise.rows import rows_sum


def exact_sum(
    leaf: jax.Array, method: SumMethod, axis: Axis, *, most_rows: int | None = None
) -> jax.Array:
    """Return the sum of an array over replicas, in the dtype in which devices add.

    Args:
      leaf: This replica's array.
      method: Method of the sum; its form is not used.
      axis: All replicas.
      most_rows: Most rows of a replica that are not zero; None for a dense array.

    Outside of a step there is one replica:

    >>> exact_sum(jnp.ones(2), SumMethod(), Axis(name=None, size=1))
    Array([1., 1.], dtype=float32)
    """
    wide, inside = on_wire(leaf), method.inside(axis.size)
    if axis.name is None:
        return wide
    by_rows = method.synchronise == "rows"
    if by_rows and rows_shrink(leaf.shape, leaf.dtype, axis.size, most_rows):
        assert most_rows is not None, "what shrinks has a number of rows"
        return rows_sum(wide, most_rows, axis)
    if inside in (1, axis.size):
        return _plain_sum(wide, axis)[0]
    return hierarchical_sum(wide, axis, inside, _plain_sum)[0]


class LossySum(NamedTuple):
    """Sum of shares that travelled in a narrow form.

    Attributes:
      total: The sum, the same on all replicas.
      owed: What this replica owes then. Over all replicas, the sum and what they owe
        are what was given.
      factor: Warm start of the next sum; None where there is none.
    """

    total: jax.Array
    owed: jax.Array
    factor: jax.Array | None = None


def lossy_sum(
    share: jax.Array,
    method: SumMethod,
    axis: Axis,
    *,
    dtype: DTypeLike,
    factor: jax.Array | None = None,
) -> LossySum:
    """Return the sum of shares that travel in a narrow form, and what is owed then.

    What does not shrink on so many replicas goes whole.

    Args:
      share: This replica's share of the update and what it owes from before, in
        float32 or float64.
      method: Method of the sum, with a narrow form.
      axis: All replicas.
      dtype: Dtype of the gradient.
      factor: Warm start of an approximation of low rank.

    >>> int8, alone = SumMethod(compress="int8"), Axis(name=None, size=1)
    >>> lossy_sum(jnp.ones(2), int8, alone, dtype=jnp.float32).owed
    Array([0., 0.], dtype=float32)
    """
    if axis.size == 1:
        return LossySum(exact_sum(share, method, axis), jnp.zeros_like(share), factor)
    if not shrinks(method, share.shape, dtype, axis.size):
        sent = share.astype(wire_dtype(dtype))
        left = share - sent.astype(share.dtype)
        return LossySum(exact_sum(sent, method, axis).astype(share.dtype), left, factor)
    if factor is not None:
        return LossySum(
            *low_rank_sum(share, factor, lambda x: exact_sum(x, method, axis))
        )
    form, inside = method.compress, method.inside(axis.size)
    assert form is not None, "what shrinks has a form"

    def across(part: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
        return owned_sum(part, axis, form)

    if inside > 1:
        total, owed = hierarchical_sum(share, axis, inside, across)
        assert owed is not None, "a narrow sum owes"
        return LossySum(total, owed)
    total, owed = across(share.reshape(-1), axis)
    return LossySum(total.reshape(share.shape), owed.reshape(share.shape))


def owed_at_first(leaf: jax.Array) -> jax.Array:
    """Return what a replica owes of a gradient like `leaf` before the first update.

    >>> owed_at_first(jnp.ones(2))
    Array([0., 0.], dtype=float32)
    """
    return jnp.zeros(jnp.shape(leaf), sum_dtype(jnp.result_type(leaf)))


def _plain_sum(leaf: jax.Array, axis: Axis) -> tuple[jax.Array, None]:
    return lax.psum(leaf, axis.name, axis_index_groups=axis.groups), None
