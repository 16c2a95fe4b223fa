"""Take parameters out of a module and put others in; differentiate by them."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from replicator.base.tracebacks import short_traceback
from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
from replicator.engine.step.gradients import (
    LocalSum,
    LocalSums,
    as_means,
    checked_sums,
    grads_of_each,
    together,
)
from replicator.errors import (
    ArgumentError,
    check_function,
)

Model = TypeVar("Model", bound=nnx.Module)


@short_traceback
def params_of(model: nnx.Module) -> PyTree:
    """Take the parameters, which an optimizer updates, out of a model.

    Args:
      model: Any module.

    Returns:
      Its `nnx.Param` arrays in nested dicts, named as the module's attributes.

    Raises:
      ArgumentError: `model` is not a module.

    >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> jax.tree.map(jnp.shape, params_of(model))
    {'bias': (2,), 'kernel': (3, 2)}
    """
    _check_module(model)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@short_traceback
def with_params(model: Model, params: PyTree) -> Model:
    """Copy a model with other parameters; statistics and the rest stay.

    Args:
      model: Any module.
      params: Arrays as `params_of` names them: updated ones, or an average.

    Returns:
      The copy; `model` keeps its own.

    Raises:
      ArgumentError: `model` is not a module, or `params` are those of another.

    >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> zero = with_params(model, jax.tree.map(jnp.zeros_like, params_of(model)))
    >>> float(zero(jnp.ones(3)).sum())
    0.0
    """
    _check_module(model)
    graphdef, own, rest = nnx.split(model, nnx.Param, ...)
    given = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    named = dict(named_leaves(nnx.to_pure_dict(own))).keys()
    found = dict(named_leaves(given)).keys()
    if odd := sorted(named ^ found):
        raise ArgumentError(
            "`params` must be named as in `params_of(model)`, got others: "
            f"`{odd[0]}` is {'missing' if odd[0] in named else 'new'}. Pass the result "
            "of `optax.apply_updates`."
        )
    return nnx.merge(graphdef, params, rest, copy=True)


@short_traceback
def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[tuple[Any, Any], PyTree]]:
    """Differentiate a loss with respect to the parameters of its first argument.

    The loss may move the model (batch statistics, counts of random keys): it works on
    a copy. Other modules among its arguments are constants; clone one in the loss if
    it moves there.

    Args:
      loss_fn: `loss_fn(model, *args)` returns a loss, or `(loss, aux)`. A loss is a
        scalar, the mean over this replica's examples; or a `LocalSum`, which is exact
        where replicas have different numbers of them.
      has_aux: Whether it returns `(loss, aux)`.

    Returns:
      A function of the same arguments that returns `((loss, model), grads)` or
      `(((loss, aux), model), grads)`: the model as the loss left it, and gradients as
      `params_of` names parameters. Of a `LocalSum`, `loss` is a `Mean` to be reported
      as it is, and the gradient is for `update(..., count=loss.weight)`.

    Raises:
      ArgumentError: `loss_fn` is not a function; or, later, its model is not a module.

    >>> def loss_fn(model, batch):
    ...     return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
    >>> def step_fn(state, batch):
    ...     (loss, model), grads = value_and_grad(loss_fn)(state["model"], batch)
    ...     params = params_of(model)
    ...     updates, opt = optimizer.update(grads, state["opt"], params)
    ...     model = with_params(model, optax.apply_updates(params, updates))
    ...     return {"model": model, "opt": opt}, {"loss": loss}
    """
    check_function("loss_fn", loss_fn)

    def value_and_grad_fn(model: nnx.Module, *args: Any) -> Any:
        _check_module(model)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def moving_loss(params: PyTree) -> tuple[list[Array], tuple[Any, Any, Any]]:
            copy = nnx.merge(graphdef, params, rest, copy=True)
            returned = loss_fn(copy, *args)
            loss, aux = returned if has_aux else (returned, None)
            moved = nnx.to_pure_dict(nnx.state(copy, nnx.Not(nnx.Param)))
            if isinstance(loss, LocalSum | LocalSums):
                values, counts = checked_sums(loss)
                return values, (as_means(values, counts), (aux, moved), counts)
            return [_checked_mean(loss)], (loss, (aux, moved), [])

        params = nnx.to_pure_dict(params)
        _, (loss, (aux, moved), counts), each = grads_of_each(moving_loss, params)
        grads = together(each, counts)
        value = (loss, aux) if has_aux else loss
        return (value, nnx.merge(graphdef, params, moved, copy=True)), grads

    return value_and_grad_fn


def _checked_mean(loss: Any) -> Array:
    array = jnp.asarray(loss)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(
            "`loss_fn` must return one floating-point number or a `LocalSum`, got "
            f"{describe(array)}. Take the mean over this replica's examples."
        )
    return array


def _check_module(model: object) -> None:
    if not isinstance(model, nnx.Module):
        raise ArgumentError(
            f"`model` must be a module of flax NNX, got `{type(model).__name__}`. Pass "
            "the one that the state holds."
        )
