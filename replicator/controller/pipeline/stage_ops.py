"""Forward and backward of a stage, as ops of its slice.

The forward is `jax.vjp` of the stage: its residuals stay on the slice until the
backward takes them. A residual that is an argument (a weight that is multiplied by) is
not returned, as XLA would copy it for each microbatch: the backward gets the argument.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.types import PyTree
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.engine.analysis import replication_check as proof
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

    @property
    def keys(self) -> list[Any]:
        """The key, for stages that take one."""
        return [] if self.key is None else [self.key]

    def in_batch_of(self, count: int) -> AbstractContextManager[None]:
        """Return a context in which it is one of so many microbatches."""
        return in_microbatch(Microbatch(self.number, count))


def stage_ops(
    fn: Callable[..., PyTree],
    loss: Callable[..., Any] | None,
    *,
    number: int,
    count: int,
    bind: tuple[Bind, Bind],
    like: tuple[PyTree, StageInput],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward of a stage, for arguments of one structure.

    Args:
      fn: `fn(params, x)`, or `fn(params, x, key)`.
      loss: `loss(y, targets)`, for the last stage.
      number: Its number; the first one takes the batch, which has no gradient.
      count: Number of microbatches.
      bind: Makes the op of the forward, and that of the backward.
      like: Shapes of its parameters and its input.

    Returns:
      `forward(token, params, given)` returns the next token, results (the sum of the
      loss, in the last stage), the count of the loss, and residuals.
      `backward(token, sums, residuals, cotangent)` returns the next token, the sums of
      gradients, and the gradient of the input in a list, which is empty in the first
      stage. The token makes ops of a slice run one after the other, as the stream of a
      device does: a CPU would run all whose inputs are there, and keep their residuals.

    Warns:
      SharedRandomKeyWarning: Examples of all microbatches get the same random numbers.

    Raises:
      ArgumentError: It returns what has no gradient, or the loss is no scalar.
    """
    run = functools.partial(_run, fn, loss, number, count)
    closed, (y, aux, back) = jax.make_jaxpr(run, return_shape=True)(*like)
    structure, tree = jax.tree.structure((y, aux)), jax.tree.structure(back)
    if count > 1:
        params, (*batch, key) = like
        kinds = (proof.STATE, params), (proof.BATCH, batch), (proof.CLEAN, key)
        marks = [mark for mark, tree in kinds for _ in jax.tree.leaves(tree)]
        proof.warn_of_microbatches(closed.jaxpr, marks, slice(0))
    invars = {var: at for at, var in enumerate(closed.jaxpr.invars)}
    saved = closed.jaxpr.outvars[structure.num_leaves :]
    # For each residual, which argument it is, if it is one.
    given_at = [
        None if isinstance(var, core.Literal) else invars.get(var) for var in saved
    ]

    def run_forward(token: jax.Array, *leaves: jax.Array) -> Any:
        outs = core.jaxpr_as_fun(closed)(*leaves)
        results = jax.tree.unflatten(structure, outs[: structure.num_leaves])
        residuals = zip(outs[structure.num_leaves :], given_at, strict=True)
        return token + 1, results, [out for out, at in residuals if at is None]

    def run_backward(
        token: jax.Array, sums: PyTree, residuals: Any, cotangent: PyTree
    ) -> Any:
        if cotangent is None:  # of the loss
            cotangent = jnp.ones((), y.dtype)
        of_params, *of_x = jax.tree.unflatten(tree, residuals)(cotangent)
        sums = jax.tree.map(
            lambda sum_, new: sum_ + new.astype(sum_.dtype), sums, of_params
        )
        return token + 1, sums, of_x

    forward_op = bind[0](named(f"forward{number}", run_forward))

    def forward(token: jax.Array, params: PyTree, given: StageInput) -> Any:
        leaves = jax.tree.leaves((params, given))
        token, (results, counts), made = forward_op(token, *leaves)
        rest = iter(made)
        residuals = [next(rest) if at is None else leaves[at] for at in given_at]
        return token, results, counts, residuals

    return forward, bind[1](named(f"backward{number}", run_backward))


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
    params: PyTree,
    given: StageInput,
) -> tuple[PyTree, PyTree, PyTree]:
    """Return results, the count of the loss, and the function of gradients."""

    def of(params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        with given.in_batch_of(count):
            y = fn(params, x, *given.keys)
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
