"""Forward and backward of a stage, as ops of its slice.

The forward is `jax.vjp` of the stage: its residuals stay on the slice until the
backward takes them. A residual that is an argument (a weight that is multiplied by) is
not returned, as XLA would copy it for each microbatch: the backward gets the argument.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.types import PyTree
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.controller.pipeline.stage_layout import StageLayout
from replicator.engine.analysis import replication_check as proof
from replicator.engine.partitioned import gradient_cut, mark_of
from replicator.engine.sharding_constraints.emit import Marks
from replicator.engine.sharding_constraints.one_replica import traced_alone
from replicator.engine.step.gradients import LocalSum, LocalSums
from replicator.errors import ArgumentError


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
    number: Any
    key: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage, and what its ops are made with.

    Attributes:
      number: Its number; the first one takes the batch, which has no gradient.
      fn: `fn(params, x)`, or `fn(params, x, key)`.
      loss: `loss(y, targets)`, of the last stage.
      microbatches: Number of microbatches.
      layout: How it lies on its slice.
      bind: `pw.fn` for its slice.
    """

    number: int
    fn: Callable[..., PyTree]
    loss: Callable[..., Any] | None
    microbatches: int
    layout: StageLayout
    bind: Callable[..., Callable[..., PyTree]]

    def results(self, params: PyTree, given: StageInput) -> PyTree:
        """Return what it computes of a microbatch."""
        key = [] if given.key is None else [given.key]
        with in_microbatch(Microbatch(given.number, self.microbatches)):
            return self.fn(params, given.x, *key)

    def with_gradients(
        self, params: PyTree, given: StageInput
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return results, the count of the loss, and the function of gradients."""

        def of(params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
            y = self.results(params, given._replace(x=x))
            if self.loss is None:
                _check_results(self.number, y)
                return y, None
            return _loss_and_count(self.loss(y, given.targets))

        if self.number == 0:
            y, back, count = jax.vjp(lambda p: of(p, given.x), params, has_aux=True)
        else:
            y, back, count = jax.vjp(of, params, given.x, has_aux=True)
        return y, count, back


def forward_op(
    stage: Stage, run: Callable[..., PyTree], given: StageInput, placed: PyTree
) -> Callable[..., Any]:
    """Return the op of a token, parameters and input: the next token, and results.

    Args:
      stage: The stage.
      run: What it does: `stage.results`, or more.
      given: Its input.
      placed: How its parameters lie.
    """
    layout, marks = stage.layout, list(map(mark_of, jax.tree.leaves(placed)))

    def forward(token: jax.Array, params: PyTree, given: StageInput) -> Any:
        return token + 1, layout.run(run, (params, given), marks=marks)

    forward.__name__ = f"forward{stage.number}"
    of_params = jax.tree.map(lambda each: layout.spec(each.stored), placed)
    of_given = StageInput(
        layout.examples(given.x), layout.examples(given.targets), number=None, key=None
    )
    return stage.bind(forward, in_specs=(None, of_params, of_given))


def stage_ops(
    stage: Stage, params: PyTree, given: StageInput, placed: PyTree
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward of a stage, for arguments of one structure.

    Args:
      stage: The stage.
      params: Its parameters.
      given: Its input.
      placed: How its parameters lie.

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
    closed, shapes = traced_alone(stage.with_gradients, (params, given))
    if stage.microbatches > 1:
        *batch, key = given
        kinds = (proof.STATE, params), (proof.BATCH, batch), (proof.CLEAN, key)
        noise = [mark for mark, tree in kinds for _ in jax.tree.leaves(tree)]
        proof.warn_of_microbatches(closed.jaxpr, noise, slice(0))
    invars = {var: at for at, var in enumerate(closed.jaxpr.invars)}
    count = jax.tree.structure(shapes[:2]).num_leaves
    # For each residual, which argument it is, if it is one.
    given_at = [
        None if isinstance(var, core.Literal) else invars.get(var)
        for var in closed.jaxpr.outvars[count:]
    ]

    def run(*arguments: PyTree) -> tuple[PyTree, list[jax.Array]]:
        outs = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arguments))
        results = jax.tree.unflatten(jax.tree.structure(shapes[:2]), outs[:count])
        residuals = zip(outs[count:], given_at, strict=True)
        return results, [out for out, at in residuals if at is None]

    op = forward_op(stage, run, given, placed)

    def forward(token: jax.Array, params: PyTree, given: StageInput) -> Any:
        leaves = jax.tree.leaves((params, given))
        token, ((results, counts), made) = op(token, params, given)
        rest = iter(made)
        residuals = [next(rest) if at is None else leaves[at] for at in given_at]
        return token, results, counts, residuals

    marks = dict(enumerate(map(mark_of, jax.tree.leaves(placed))))
    of_residuals = [None if at is None else marks.get(at) for at in given_at]
    y, _, back = shapes
    return forward, _backward(stage, back, y, marks=of_residuals, placed=placed)


def _backward(
    stage: Stage, back: PyTree, y: PyTree, *, marks: Marks, placed: PyTree
) -> Callable[..., Any]:
    """Return the op of the backward.

    Args:
      stage: The stage.
      back: Its function of gradients, whose leaves are residuals.
      y: Shapes of its results.
      marks: Residuals that lie in pieces.
      placed: How its parameters lie.
    """
    layout, structure = stage.layout, jax.tree.structure(back)
    targets = list(map(gradient_cut, jax.tree.leaves(placed)))

    def gradients(residuals: PyTree, cotangent: PyTree) -> PyTree:
        return jax.tree.unflatten(structure, residuals)(cotangent)

    def backward(
        token: jax.Array, sums: PyTree, residuals: PyTree, cotangent: PyTree
    ) -> Any:
        if cotangent is None:  # of the loss
            cotangent = jnp.ones((), y.dtype)
        of_params, *of_x = layout.run(
            gradients, (residuals, cotangent), marks=marks, targets=targets
        )
        sums = jax.tree.map(
            lambda sum_, new: sum_ + new.astype(sum_.dtype), sums, of_params
        )
        return token + 1, sums, of_x

    backward.__name__ = f"backward{stage.number}"
    specs = jax.tree.map(lambda each: layout.spec(each.gradient), placed)
    cotangents = layout.examples(y) if stage.loss is None else None
    return stage.bind(
        backward,
        in_specs=(None, specs, None, cotangents),
        out_specs=(None, specs, None),
    )


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
