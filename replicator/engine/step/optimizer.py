"""Reduce gradients over replicas, then update: a wrapper of any optax transformation.

The reduction is innermost: clipping, schedules, masks and chains see the gradient of
the whole global batch. Gradients keep their dtype on the wire, except float16, which is
reduced in float32 and takes twice its bytes.

Under accumulation the step runs once per microbatch with the optimizer's state
`Collecting` (gradients add up, updates are zero), then once more with the sums
`Collected` (they are reduced and the inner transformation runs): its structure decides.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from replicator.base.global_norm import global_norm
from replicator.base.mesh import REPLICA_AXIS
from replicator.base.tracebacks import short_traceback
from replicator.base.types import PyTree
from replicator.collectives.context.axes import num_replicas
from replicator.collectives.markers import mark_reduced
from replicator.engine.reduction.reducer import Reducer
from replicator.engine.step.gradient_sums import (
    UpdateArguments,
    Valued,
    added,
    check_own_grads,
    check_shapes,
    checked_given,
    collect_given,
    no_own_sums,
    scaled,
    with_value,
)
from replicator.engine.step.loss_scale import DynamicLossScale
from replicator.engine.step.optimizer_state import (
    Collected,
    Collecting,
    Learning,
    OptimizerState,
    OwnSums,
    Reduction,
    Show,
    Showing,
    check_optimizer_state,
    note_update,
    nothing_yet,
    one_of,
)
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_kind,
    check_text,
    check_word,
)
from replicator.strategies.strategy import Strategy


@short_traceback
def wrap_optimizer(
    tx: optax.GradientTransformation,
    *,
    name: str = "params",
    skip_nonfinite: bool = False,
    loss_scale: DynamicLossScale | None = None,
    accumulate: int = 1,
    reduction: Reduction = "fast",
    axis_name: str = REPLICA_AXIS,
    strategy: Strategy | Callable[[], Strategy | None] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Reduce gradients over all replicas and microbatches, then let `tx` update.

    `update(grads, state, params, count=n)` takes one replica's gradients of the *sum*
    of its losses over `n` examples (or tokens), as `replicator.value_and_grad` makes
    them; the result is exactly the gradient of the mean over the examples of all
    replicas and microbatches. Gradients of several sums bring their counts with them:
    leave `count` out. `weight=n` takes gradients of the mean over `n` examples
    instead: exact if the loss has no collectives, and refused if it has and weights
    differ. With neither, all replicas and microbatches count alike. The
    `value=` of the loss that some optimizers take (`optax.polyak_sgd`) is the mean of
    this replica's examples; `tx` gets that of all. Outside a replica context it acts as
    one replica.

    Args:
      tx: Any optax transformation.
      name: First path component of the parameters it updates; each optimizer of a state
        has its own.
      skip_nonfinite: Leave parameters and `tx` as they are when the reduced gradient
        holds NaN or infinity, and count it in `OptimizerState.skipped`; all replicas
        agree.
      loss_scale: A dynamic loss scale for float16; multiply the loss by
        `replicator.scale_loss`. Implies `skip_nonfinite`. For parameters in float16
        `tx` works, and keeps its state, in float32.
      accumulate: For own loops that feed microbatches one by one: every call adds up,
        every `accumulate`-th updates. With `rep.compile(step_fn, accumulate=k)` leave
        it at 1. (The sums of `optax.MultiSteps` around this are refused, as they differ
        between replicas; under it, each call would reduce, and weights not count.)
      reduction: `"ordered"` adds replicas × microbatches blocks in example order: bits
        stay while that product does (see `Replicator`); `"fast"` leaves the order to
        XLA.
      axis_name: Mesh axis of the replicas; another one for a mesh of your own.
      strategy: A strategy that replicates, whose rules decide how each gradient adds
        up, or a function that returns it once it is known; `rep.wrap_optimizer` passes
        the replicator's.

    Returns:
      An optax transformation whose state is an `OptimizerState`.

    Raises:
      ArgumentError: `tx` is not a transformation, or another argument breaks its rule.

    >>> optimizer = wrap_optimizer(optax.sgd(0.1))       # or `rep.wrap_optimizer`
    >>> def step_fn(state, batch):
    ...     loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    ...     updates, opt = optimizer.update(grads, state["opt"], state["params"])
    ...     params = optax.apply_updates(state["params"], updates)
    ...     return {"params": params, "opt": opt}, {"loss": loss}
    """
    _check_transformation(tx)
    check_text("name", name)
    check_text("axis_name", axis_name)
    check_flags(skip_nonfinite=skip_nonfinite)
    check_kind("loss_scale", loss_scale, DynamicLossScale)
    check_count("accumulate", accumulate)
    check_reduction(reduction)
    if reduction == "ordered" and accumulate > 1:
        raise ArgumentError(
            "`accumulate` must be 1 with `reduction='ordered'`, got "
            f"{accumulate}. Accumulate with `rep.compile(step_fn, accumulate=...)`."
        )
    if axis_name != REPLICA_AXIS and (accumulate > 1 or reduction == "ordered"):
        raise ArgumentError(
            "`axis_name` must be 'replica' with `accumulate` above 1 or "
            f"`reduction='ordered'`, got {axis_name!r}. Leave those out in a mesh of "
            "your own."
        )
    if not callable(strategy):
        check_kind("strategy", strategy, Strategy)
    reducer = Reducer(
        name=name,
        reduction=reduction,
        axis_name=axis_name,
        strategy_fn=strategy if callable(strategy) else lambda: strategy,
    )
    wrapped = _Wrapped(
        tx=optax.with_extra_args_support(tx),
        reducer=reducer,
        skip=skip_nonfinite or loss_scale is not None,
        loss_scale=loss_scale,
        accumulate=accumulate,
    )
    typed: Any = wrapped  # optax types states and updates narrower than it treats them
    return optax.GradientTransformationExtraArgs(typed.init, typed.update)


def _check_transformation(tx: optax.GradientTransformation) -> None:
    # By its attributes: transformations of other libraries are as good.
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise ArgumentError(
            f"`tx` must be an optax transformation, got {name}. Pass the result of its "
            "function: `optax.adam(1e-3)`."
        )


def check_reduction(reduction: Reduction) -> None:
    """Refuse an unknown way to add up gradients.

    Raises:
      ArgumentError: It is neither `"fast"` nor `"ordered"`.

    >>> check_reduction("ordered")
    """
    check_word("reduction", reduction, get_args(Reduction))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wrapped:
    tx: optax.GradientTransformationExtraArgs
    reducer: Reducer
    skip: bool
    loss_scale: DynamicLossScale | None
    accumulate: int

    def init(self, params: PyTree) -> OptimizerState:
        sums = None if self.accumulate == 1 else no_own_sums(params, self.accumulate)
        return OptimizerState(
            inner=self.tx.init(self._master(params)),
            skipped=jnp.zeros((), jnp.int32) if self.skip else None,
            scale=None if self.loss_scale is None else self.loss_scale.init(),
            pending=sums,
            name=self.reducer.name,
            reduction=self.reducer.reduction,
            synchroniser=self.reducer.init(params),
        )

    def update(
        self,
        grads: PyTree,
        state: OptimizerState,
        params: PyTree = None,
        *,
        weight: jax.Array | None = None,
        count: jax.Array | None = None,
        **extra,
    ) -> tuple[PyTree, OptimizerState]:
        check_optimizer_state(state)
        given = checked_given(self.reducer.marked(grads), weight, count)
        one = one_of(grads)
        self._check_shapes(one, state, params, extra)
        if extra.get("value") is not None and not isinstance(state.pending, OwnSums):
            given = with_value(given, extra["value"])
        reduce = functools.partial(self.reducer.reduce, state=state, like=given.grads)
        finish = functools.partial(self._finish, params=params, extra=extra)
        match state.pending:
            case Learning() as learning:
                collect = functools.partial(
                    collect_given, nothing_yet(), given, state.reduction
                )
                learning.given.calls.append(jax.eval_shape(collect))
                return _no_updates(one, params), state
            case Collecting() as pending:
                return _no_updates(one, params), dataclasses.replace(
                    state, pending=collect_given(pending, given, state.reduction)
                )
            case Collected() as sums:
                total = UpdateArguments(sums.total, sums.share, sums.weight)
                mean = _tie(reduce(total, summed=True), sums.count)
                updates, after, reduced = finish(mean, state)
                after = _show(after, sums, _shown(given.grads, reduced, sums.show))
                updates, after = _tie((updates, after), sums.count)
            case OwnSums() as sums:
                return self._update_own(given, state, sums, (reduce, finish))
            case Show() as asked:
                asked.given.calls.append(None)
                updates, after, reduced = finish(reduce(given, summed=False), state)
                after = _show(after, asked, _shown(None, reduced, asked.show))
            case _:
                updates, after, _ = finish(reduce(given, summed=False), state)
        note_update(state, params, updates)
        return updates, after

    def _check_shapes(self, grads, state, params, extra) -> None:
        """Refuse gradients of single examples, by the shapes of parameters or updates.

        Without parameters by the updates, or, if gradients add up first, by the shapes
        that updates would have.
        """

        def update(grads, inner):
            return self.tx.update(self._master(grads), inner, None, **extra)[0]

        if params is not None:
            check_shapes(grads, params)
        elif isinstance(state.pending, Learning | Collecting):
            check_shapes(grads, jax.eval_shape(update, grads, state.inner))

    def _update_own(self, given, state, sums, reduce_and_finish):
        """Add one microbatch of an own loop; reduce and update at the last."""
        reduce, finish = reduce_and_finish
        check_own_grads(sums.total.value, given.grads)
        # Without weights a microbatch counts once, on any number of replicas: the sums
        # may be saved, and go on with microbatches on another number of them.
        scalar = given.weight
        if scalar is None:
            scalar = jnp.ones(()) / num_replicas(axis_name=self.reducer.axis_name)
        factor = None if given.share == "count" else scalar
        total = added(sums.total.value, given.grads, factor)
        weights = sums.weight.value + scalar.astype(sums.weight.value.dtype)
        count = sums.count + 1

        def update(total, weights):
            # Weighted always: replicas may have been given weights at some calls only.
            everything = UpdateArguments(total, "weight", weights)
            updates, after, _ = finish(reduce(everything, summed=True), state)
            zeros = (
                optax.tree.zeros_like(total),
                jnp.zeros_like(weights),
                jnp.zeros_like(count),
            )
            return updates, after, *zeros

        def wait(total, weights):
            return optax.tree.zeros_like(given.grads), state, total, weights, count

        updates, after, total, weights, count = lax.cond(
            count == self.accumulate, update, wait, total, weights
        )
        pending = dataclasses.replace(
            sums,
            total=dataclasses.replace(sums.total, value=total),
            weight=dataclasses.replace(sums.weight, value=weights),
            count=count,
        )
        return updates, dataclasses.replace(after, pending=pending)

    def _master(self, params: PyTree) -> PyTree:
        """Return the parameters of `tx`: float16 ones under a scale in float32.

        Unscaled gradients and their squares are below what float16 holds.
        """
        if self.loss_scale is None or params is None:
            return params
        half = jnp.dtype(jnp.float16)
        return jax.tree.map(
            lambda p: p.astype(jnp.float32) if jnp.result_type(p) == half else p,
            params,
        )

    def _finish(self, reduced, state, *, params, extra):
        """Run the inner transformation on reduced gradients; return them unscaled."""
        grads, synchroniser = reduced
        if isinstance(grads, Valued):
            grads, extra = grads.grads, extra | {"value": grads.value}
        grads = mark_reduced(grads, state.name)
        # Half precision would overflow in the norm, and underflow when unscaled.
        factor = None if state.scale is None else 1 / state.scale.value
        wide = scaled(grads, factor)
        used = (
            grads if factor is None else optax.tree.cast_like(wide, self._master(grads))
        )
        updates, inner = self.tx.update(
            used, state.inner, self._master(params), **extra
        )
        check_shapes(grads, updates)
        if factor is not None:
            updates = optax.tree.cast_like(updates, grads)
        after = dataclasses.replace(state, inner=inner, synchroniser=synchroniser)
        if self.skip:
            finite = _all_finite(wide)
            updates, after = self._skip_nonfinite(finite, updates, state, after)
        return updates, after, wide

    def _skip_nonfinite(self, finite, updates, state, after):
        # Gradients are reduced: `finite` is the same on every replica.
        assert state.skipped is not None
        return optax.tree.where(
            finite, updates, optax.tree.zeros_like(updates)
        ), dataclasses.replace(
            after,
            inner=optax.tree.where(finite, after.inner, state.inner),
            synchroniser=optax.tree.where(
                finite, after.synchroniser, state.synchroniser
            ),
            skipped=state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32),
            scale=self.loss_scale.update(state.scale, finite)
            if self.loss_scale is not None
            else None,
        )


def _no_updates(grads: PyTree, params: PyTree) -> PyTree:
    """Return updates of zero; there may be more parameters than gradients."""
    alike = params is None or jax.tree.structure(params) == jax.tree.structure(grads)
    return optax.tree.zeros_like(grads if alike else params)


def _shown(given: PyTree, reduced: PyTree, what: Showing) -> PyTree:
    """Return the gradients, or their norm, as asked for; None if neither is."""
    if what == "norm":
        return global_norm(reduced).astype(jnp.float32)
    return {"given": given, "reduced": reduced}.get(what)


def _show(
    state: OptimizerState, pending: Collected | Show | None, shown: PyTree
) -> OptimizerState:
    """Put a shown value into the state; otherwise nothing stays pending."""
    if pending is not None and shown is not None:
        return dataclasses.replace(
            state, pending=dataclasses.replace(pending, shown=shown)
        )
    return dataclasses.replace(state, pending=None)


def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all() if leaves else jnp.asarray(True)


def _tie(tree: PyTree, count: jax.Array) -> PyTree:
    """Make every leaf depend on the sums, for the analysis; XLA removes the select."""
    return jax.tree.map(lambda leaf: jnp.where(count >= 0, leaf, leaf), tree)
