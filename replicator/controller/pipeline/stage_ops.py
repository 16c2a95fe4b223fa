"""Forward and backward of a stage, as ops of its slice.

The forward is `jax.vjp` of the stage: its residuals stay on the slice until the
backward takes them. A residual that is an argument (a weight that is multiplied by) is
not returned, as XLA would copy it for each microbatch: the backward gets the argument.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.types import PyTree
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.engine.step.gradients import LocalSum, LocalSums
from replicator.errors import ArgumentError

Bind = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
"""`pw.fn` for the slice of a stage."""


class StageInput(NamedTuple):
    """What a stage takes for one microbatch, beside its parameters.

    Attributes:
      x: The results of the stage before it, or its part of the batch.
      targets: What the loss takes, in the last stage.
      number: Number of the microbatch.
      key: Random key of the update; None if no key was passed.
    """

    x: PyTree
    targets: PyTree
    number: jax.Array
    key: Any


class StageOps:
    """Forward and backward of a stage, traced for arguments of one structure.

    Args:
      fn: `fn(params, x)`, or `fn(params, x, key)`.
      loss: `loss(y, targets)`, for the last stage.
      number: Its number; the first one takes the batch, which has no gradient.
      count: Number of microbatches.
      key_impl: Of the random key, whose data it is given.
      forward: Makes the op of the forward.
      backward: Makes the op of the backward.
      like: Shapes of its parameters and its input.

    Raises:
      ArgumentError: It returns what has no gradient, or the loss is no scalar.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        loss: Callable[..., Any] | None,
        *,
        number: int,
        count: int,
        key_impl: Any,
        forward: Bind,
        backward: Bind,
        like: tuple[PyTree, StageInput],
    ) -> None:
        run = functools.partial(_run, fn, loss, number, count, key_impl)
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*like)
        self._shapes = shapes
        self._closed = closed
        outvars, invars = closed.jaxpr.outvars, closed.jaxpr.invars
        flat, self._tree = jax.tree.flatten(shapes[2])
        first = len(outvars) - len(flat)
        # For each residual, which argument or result it is.
        self._kept = list(range(first))
        self._sources: list[tuple[bool, int]] = []
        for at, var in enumerate(outvars[first:], first):
            if not isinstance(var, core.Literal) and var in invars:
                self._sources.append((True, invars.index(var)))
            else:
                self._sources.append((False, len(self._kept) - first))
                self._kept.append(at)
        self._taken = sorted({at for is_given, at in self._sources if is_given})
        self._forward = forward(named(f"forward{number}", self._run_forward))
        self._backward = backward(named(f"backward{number}", self._run_backward))

    def forward(
        self, token: jax.Array, params: PyTree, given: StageInput
    ) -> tuple[jax.Array, PyTree, PyTree, Any]:
        """Run it for one microbatch, after the op of the slice that made the token.

        Returns:
          The next token, the results (the sum of the losses, in the last stage), the
          count (likewise), and what `backward` takes.
        """
        leaves = jax.tree.leaves((params, given))
        token, *outs = self._forward(token, *leaves)
        y, aux, _ = self._shapes
        size, ahead = jax.tree.structure(y).num_leaves, len(jax.tree.leaves((y, aux)))
        results = jax.tree.unflatten(jax.tree.structure(y), outs[:size])
        counts = jax.tree.unflatten(jax.tree.structure(aux), outs[size:ahead])
        return (
            token,
            results,
            counts,
            ([leaves[at] for at in self._taken], outs[ahead:]),
        )

    def backward(
        self, token: jax.Array, sums: PyTree, saved: Any, cotangent: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Add a microbatch's gradients to the sums.

        Returns:
          The next token, the sums, and the gradient of the input; that of the first
          stage is None.
        """
        return self._backward(token, sums, *saved, cotangent)

    def _run_forward(self, token: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        outs = core.jaxpr_as_fun(self._closed)(*leaves)
        # The token makes ops of a slice run one after the other, as a device's stream
        # does: else a CPU runs all whose inputs are there, and keeps their residuals.
        return [token + 1, *(outs[at] for at in self._kept)]

    def _run_backward(
        self,
        token: jax.Array,
        sums: PyTree,
        given: Sequence[jax.Array],
        saved: Sequence[jax.Array],
        cotangent: PyTree,
    ) -> tuple[jax.Array, PyTree, PyTree]:
        values = dict(zip(self._taken, given, strict=True))
        leaves = [
            values[at] if is_given else saved[at] for is_given, at in self._sources
        ]
        if cotangent is None:  # of the loss
            cotangent = jnp.ones((), self._shapes[0].dtype)
        of_params, *of_x = jax.tree.unflatten(self._tree, leaves)(cotangent)
        sums = jax.tree.map(
            lambda total, new: total + new.astype(total.dtype), sums, of_params
        )
        return token + 1, sums, of_x[0] if of_x else None


def named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under a name, which its op has, too."""

    def renamed(*args: Any) -> Any:
        return run(*args)

    renamed.__name__ = name
    return renamed


def _run(
    fn: Callable[..., PyTree],
    loss: Callable[..., Any] | None,
    number: int,
    count: int,
    key_impl: Any,
    params: PyTree,
    given: StageInput,
) -> tuple[PyTree, PyTree, PyTree]:
    """Return results, the count of the loss, and the function of gradients."""

    def of(params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        key = given.key
        if key_impl is not None and key is not None:
            key = jax.random.wrap_key_data(key, impl=key_impl)
        with in_microbatch(Microbatch(given.number, count)):
            y = fn(params, x) if key is None else fn(params, x, key)
            if loss is None:
                _check_results(number, y)
                return y, None
            return _loss_and_count(loss(y, given.targets))

    if number == 0:
        y, back, aux = jax.vjp(lambda params: of(params, given.x), params, has_aux=True)
    else:
        y, back, aux = jax.vjp(of, params, given.x, has_aux=True)
    return y, aux, back


def _check_results(number: int, y: PyTree) -> None:
    for leaf in jax.tree.leaves(y):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ArgumentError(
                f"`stages[{number}]` must return floating point numbers, which have a "
                f"gradient, got {jnp.result_type(leaf)}{list(jnp.shape(leaf))}. Pass "
                "whole numbers in the batch, or as floats."
            )


def _loss_and_count(value: Any) -> tuple[jax.Array, jax.Array]:
    if isinstance(value, LocalSum):
        return jnp.asarray(value.value), jnp.asarray(value.count, jnp.float32)
    if isinstance(value, LocalSums) or jnp.shape(value):
        what = "several" if isinstance(value, LocalSums) else jnp.shape(value)
        raise ArgumentError(
            f"`loss` must return a scalar, or one `LocalSum`, got {what}. Add up, or "
            "take the mean."
        )
    return jnp.asarray(value), jnp.ones((), jnp.float32)
