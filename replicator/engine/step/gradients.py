"""Differentiate a loss that is a sum over examples, exactly on any number of replicas.

Where replicas hold different numbers of examples or tokens, the gradient of the mean
over all of them is the sum of the gradients of each replica's *sum*, divided once by
the total count. That holds also for a loss with collectives of its own, such as
cross-replica batch norm: its backward pass sends each replica the cotangents of the
other replicas' losses, and in a sum all of these count alike. Gradients of local means
would arrive scaled by 1/n of the replica they come from, and no weight applied
afterwards can undo that.

    def loss_fn(params, batch):
        losses = per_example_loss(params, batch) * batch["mask"]
        return LocalSum(losses.sum(), count=batch["mask"].sum())

    loss, grads = value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = tx.update(grads, state["opt"], state["params"], count=loss.weight)

A term that is not per example, such as weight decay in the loss, is multiplied by the
local count: `losses.sum() + count * penalty(params)`. Terms with counts of their own
(heads that predict other tokens, a policy and a value with masks of their own) are sums
of their own, whose gradients stay apart until each is divided by its count:

    return LocalSum(policy.sum(), moves.sum()) + 0.5 * LocalSum(value.sum(), mask.sum())
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call
from jax.typing import ArrayLike

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.tracebacks import short_traceback
from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
from replicator.collectives.context.axes import at_leaf, resolve_axis
from replicator.collectives.markers import mark_global, mark_local_sum
from replicator.collectives.precision import sum_dtype
from replicator.engine.metrics.declared import Mean, Means
from replicator.engine.step.optimizer_state import GradientsOfSums
from replicator.errors import ArgumentError, check_function


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSum:
    """A loss: the sum over the examples of this replica, and their number.

    Attributes:
      value: The sum, a scalar; not reduced over replicas.
      count: Number of examples (or tokens) in it, a scalar ≥ 0; usually `mask.sum()`.

    >>> def loss_fn(params, batch):       # rows of padding have `mask` 0
    ...     losses = (batch["x"] @ params["w"] - batch["y"]) ** 2 * batch["mask"]
    ...     return LocalSum(losses.sum(), count=batch["mask"].sum())
    """

    value: ArrayLike
    count: ArrayLike

    def __add__(self, other: "LocalSum | LocalSums") -> "LocalSums":
        """Return a loss of both: the mean of this one plus those of the other.

        >>> loss = LocalSum(6.0, count=2) + 0.5 * LocalSum(4.0, count=4)
        >>> [part.count for part in loss.parts]
        [2, 4]
        """
        return LocalSums((self,)).__add__(other)

    def __mul__(self, factor: ArrayLike) -> "LocalSum":
        """Return the sum times a factor, with the same count."""
        return LocalSum(self.value * factor, self.count)

    __rmul__ = __mul__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSums:
    """A loss of several sums, each divided by its own count: `LocalSum + LocalSum`.

    Attributes:
      parts: The sums.
    """

    parts: tuple[LocalSum, ...]

    def __add__(self, other: "LocalSum | LocalSums") -> "LocalSums":
        """Return a loss of all sums."""
        if not isinstance(other, LocalSum | LocalSums):
            return NotImplemented
        return LocalSums((*self.parts, *_parts(other)))

    def __mul__(self, factor: ArrayLike) -> "LocalSums":
        """Return each sum times a factor."""
        return LocalSums(tuple(part * factor for part in self.parts))

    __rmul__ = __mul__


def _parts(loss: LocalSum | LocalSums) -> tuple[LocalSum, ...]:
    return loss.parts if isinstance(loss, LocalSums) else (loss,)


LossFn = Callable[..., Any]
"""`loss_fn(params, *args)` returns a `LocalSum`, or several, added."""


@short_traceback
def value_and_grad(loss_fn: LossFn, *, has_aux: bool = False) -> Callable[..., Any]:
    """Differentiate a `LocalSum`; hand the gradient to `update(..., count=)`.

    Args:
      loss_fn: `loss_fn(params, *args)` returns a `LocalSum`, or `(LocalSum, aux)`; or
        several in the place of one: `LocalSum(...) + LocalSum(...)`.
      has_aux: Whether it returns `(LocalSum, aux)`.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or
      `((loss, aux), grads)`. `loss` is a `Mean` over this replica's examples (0 if it
      has none), to be reported as it is; `grads` is the gradient of the local sum, not
      reduced. With several sums, `loss` is reported as the sum of their means, and
      `grads` keeps their gradients and counts apart, one backward pass for each: pass
      it to `update` without `count`.

    Raises:
      ArgumentError: `loss_fn` is not a function; later: it returned something else, or
        a sum that is not a scalar.
      ReplicationError: When compiled: the sum was reduced over replicas already.

    >>> loss, grads = value_and_grad(lambda w, x: LocalSum((w * x).sum(), len(x)))(
    ...     2.0, jnp.arange(4.0)
    ... )
    >>> float(loss.value), float(loss.weight), float(grads)
    (3.0, 4.0, 6.0)
    """
    check_function("loss_fn", loss_fn)

    def value_and_grad_fn(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        def total_fn(params: PyTree) -> tuple[list[jax.Array], Any]:
            returned = loss_fn(params, *args, **kwargs)
            total, aux = _with_aux(returned) if has_aux else (returned, None)
            values, counts = checked_sums(total)
            return values, (counts, aux)

        values, (counts, aux), grads = grads_of_each(total_fn, params)
        loss = as_means(values, counts)
        return ((loss, aux) if has_aux else loss), together(grads, counts)

    return value_and_grad_fn


def grads_of_each(
    total_fn: Callable[[PyTree], tuple[list[jax.Array], Any]], params: PyTree
) -> tuple[list[jax.Array], Any, list[PyTree]]:
    """Differentiate each of several scalars: one pass forward, and one back for each.

    Args:
      total_fn: `total_fn(params)` returns the scalars, and aux.
      params: The point at which to differentiate.

    Returns:
      The scalars, aux, and a gradient for each.

    Raises:
      ArgumentError: `params` holds a leaf that has no gradient.

    >>> values, _, grads = grads_of_each(lambda x: ([x**2, 3.0 * x], None), 2.0)
    >>> [float(value) for value in values], [float(grad) for grad in grads]
    ([4.0, 6.0], [4.0, 3.0])
    """
    for path, leaf in named_leaves(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ArgumentError(
                f"`params` must hold floating-point leaves, got {describe(leaf)}"
                f"{at_leaf(path)}. Keep integers out of the parameters."
            )
    values, push, aux = jax.linearize(total_fn, params, has_aux=True)

    def pull(place: int) -> PyTree:
        back = jax.linear_transpose(lambda tangent: push(tangent)[place], params)
        return back(np.ones((), values[place].dtype))[0]

    return values, aux, [pull(place) for place in range(len(values))]


def together(grads: list[PyTree], counts: list[jax.Array]) -> PyTree:
    """Return gradients for `update`: one, or several with their counts."""
    return (
        grads[0]
        if len(grads) == 1
        else GradientsOfSums(tuple(grads), jnp.stack(counts))
    )


@short_traceback
def global_loss(
    loss_fn: LossFn, *, axis_name: str = REPLICA_AXIS
) -> Callable[..., jax.Array]:
    """Return the mean loss over the examples of all replicas, as one function.

    Its value and, by `jax.grad` or `jax.value_and_grad`, its gradient with respect to
    the first argument are equal on all replicas, so that line searches and implicit
    solvers may evaluate them any number of times. One all-reduce of a scalar for the
    value, one of the parameters' size for the gradient.

    Args:
      loss_fn: A loss as for `value_and_grad`, without `aux`.
      axis_name: Mesh axis of the replicas.

    Returns:
      `mean_fn(params, *args)`, a scalar; differentiable to any order, but not under
      `jax.vmap`: take products with the Hessian by `jax.jvp` of `jax.grad`.

    Raises:
      ArgumentError: As `value_and_grad`.

    >>> def local_loss(w, x):
    ...     return replicator.LocalSum(((w * x - 1.0) ** 2).sum(), count=len(x))
    >>> mean_fn = global_loss(local_loss)
    >>> float(jax.grad(mean_fn)(2.0, jnp.ones(4)))
    2.0
    """
    check_function("loss_fn", loss_fn)

    def mean_fn(params: PyTree, *args: Any, **kwargs: Any) -> jax.Array:
        axis = resolve_axis(axis_name).name
        own = params if axis is None else _of_all(params, axis)
        values, counts = checked_sums(loss_fn(own, *args, **kwargs))
        if axis is not None:
            values = [_total(value, axis) for value in values]
            counts = [lax.psum(count, axis) for count in counts]
        return as_means(values, counts).value

    return mean_fn


def checked_sums(returned: object) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return values and counts of a loss, values in float32 at least.

    Raises:
      ArgumentError: It is neither a `LocalSum` nor several, or holds no scalars.
    """
    if not isinstance(returned, LocalSum | LocalSums):
        raise ArgumentError(
            "`loss_fn` must return a `LocalSum`, got "
            f"`{type(returned).__name__}`. Write `replicator.LocalSum(losses.sum(), "
            "count)`: the sum over this replica's examples, and their number."
        )
    values, counts = zip(*map(_checked_sum, _parts(returned)), strict=True)
    return list(values), list(counts)


def _checked_sum(returned: LocalSum) -> tuple[jax.Array, jax.Array]:
    value, count = jnp.asarray(returned.value), jnp.asarray(returned.count)
    for name, scalar in (("value", value), ("count", count)):
        if scalar.ndim or not jnp.isrealobj(scalar):
            raise ArgumentError(
                f"`loss_fn` must return a scalar `{name}` in its `LocalSum`, got "
                f"{describe(scalar)}. Sum over this replica's examples."
            )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ArgumentError(
            "`loss_fn` must return a floating-point `value` in its `LocalSum`, got "
            f"{describe(value)}. Cast the losses first."
        )
    # As it was returned: the proof knows a number by its value.
    total = mark_local_sum(value.astype(sum_dtype(value.dtype)), returned.count)
    return total, lax.stop_gradient(count.astype(float))


def as_means(totals: list[jax.Array], counts: list[jax.Array]) -> Mean | Means:
    """Return the means behind sums as a metric; 0 where nothing was counted."""
    means = list(map(_as_mean, totals, counts))
    return means[0] if len(means) == 1 else Means(tuple(means))


def _as_mean(total: jax.Array, count: jax.Array) -> Mean:
    safe = jnp.where(count == 0, jnp.ones_like(count), count).astype(total.dtype)
    return Mean(jnp.where(count == 0, jnp.zeros_like(total), total / safe), count)


def _with_aux(returned: object) -> tuple[Any, Any]:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise ArgumentError(
            "`loss_fn` must return (LocalSum, aux) with `has_aux=True`, got "
            f"`{type(returned).__name__}`. Return both, or leave `has_aux` out."
        )
    return returned


# `psum` transposes to `psum` here (`check_vma=False`), which is right between a
# replica's own losses and wrong at the two ends of a global function: parameters are
# one value used by all replicas, and the total is one value. Each of these two is the
# other's transpose (the operators f and g of Shoeybi et al. 2019, "Megatron-LM", §3).
# The arguments of `_of_all`, parameters and cotangents of a total, must be equal on all
# replicas: they are marked, and the proof refuses one that may differ.
def _of_all(tree: PyTree, axis_name: str) -> PyTree:
    """Use a value that is equal on all replicas; its gradient is the sum of theirs."""
    return linear_call(
        lambda _, tree: mark_global(tree),
        lambda _, cotangent: _total(cotangent, axis_name),
        (),
        tree,
    )


def _total(tree: PyTree, axis_name: str) -> PyTree:
    """Add up over replicas into one value; its gradient is each replica's own."""
    return linear_call(
        lambda _, tree: lax.psum(tree, axis_name),
        lambda _, cotangent: _of_all(cotangent, axis_name),
        (),
        tree,
    )
