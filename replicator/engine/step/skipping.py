"""Leave out a bad update inside the compiled step, on all replicas alike.

An update is bad if a merged metric or a reduced gradient is not finite. Both are the
same on every replica, so all take the same branch and nothing more is sent. A state
without a wrapped optimizer is checked itself: finite leaves must stay so. (With one
it is not: the old state would have to be kept until all of the new one is there.)
"""

import contextlib
import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from replicator.base.per_replica import is_per_replica
from replicator.base.types import Key, PyTree
from replicator.collectives.all_reduce import all_reduce
from replicator.engine.analysis.ordered_bits import ordered_scope
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.optimizer_state import (
    OptimizerState,
    Reduction,
    is_optimizer_state,
    optimizer_states,
)
from replicator.engine.step.state import RunState
from replicator.engine.step.transforms import Measured

MOST_AXES = 1
"""Metrics with more axes are images rather than numbers, and not checked."""


def skip_bad_updates(update: KeyedStep, *, reduction: Reduction = "fast") -> KeyedStep:
    """Let `update` change nothing if it brought NaN or infinity.

    The step is counted all the same: its key and its batch are used up. A loss scale
    moves, too, as it would never come down otherwise.

    Args:
      update: An update of a `RunState`, from `count_steps`; metrics are `Measured`.
      reduction: As in `lift`.

    Returns:
      An update that returns the user's state as it was, in every bit, if a number went
      bad. `RunState.skipped`, if it is there, counts that, and a dict of metrics gets
      it as `skipped_updates`.
    """

    def guarded(run: RunState, batch: PyTree, key: Key | None):
        after, measured = update(run, batch, key)
        good = _is_good(run.user, after.user, measured, reduction=reduction)
        skipped = run.skipped
        if skipped is not None:
            skipped += jnp.where(good, 0, 1).astype(skipped.dtype)
            if isinstance(measured.metrics, dict):
                counted = {"skipped_updates": skipped.astype(jnp.float32)}
                measured = measured._replace(metrics=measured.metrics | counted)
        user = _chosen(good, after.user, run.user)
        return dataclasses.replace(after, user=user, skipped=skipped), measured

    return guarded


def _is_good(
    before: PyTree, after: PyTree, measured: Measured, *, reduction: Reduction
) -> jax.Array:
    """Return, alike on all replicas, whether every number that counts is finite."""
    norms = list(measured.gradient_norms.values())
    shared = norms + _numbers(measured.metrics, own=False)
    good = _all(map(_finite, shared))
    own = list(map(_finite, _numbers(measured.metrics, own=True)))
    if not optimizer_states(after):
        good &= _all(_stayed_finite(before, after, own=False))
        own += _stayed_finite(before, after, own=True)
    return good & _on_all_replicas(_all(own), reduction) if own else good


def _numbers(metrics: PyTree, *, own: bool) -> list[jax.Array]:
    return [
        leaf
        for leaf in _leaves(metrics, own=own)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.ndim <= MOST_AXES
    ]


def _stayed_finite(before: PyTree, after: PyTree, *, own: bool) -> list[jax.Array]:
    pairs = zip(_leaves(before, own=own), _leaves(after, own=own), strict=True)
    return [
        (jnp.isfinite(new) | ~jnp.isfinite(old)).all()
        for old, new in pairs
        if jnp.issubdtype(new.dtype, jnp.inexact)
    ]


def _leaves(tree: PyTree, *, own: bool) -> list[jax.Array]:
    """List the leaves that are, or are not, each replica's own."""
    nodes = jax.tree.leaves(tree, is_leaf=is_per_replica)
    return jax.tree.leaves([node for node in nodes if is_per_replica(node) is own])


def _finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    found = list(flags)
    return jnp.stack(found).all() if found else jnp.asarray(True)


def _on_all_replicas(good: jax.Array, reduction: Reduction) -> jax.Array:
    with ordered_scope() if reduction == "ordered" else contextlib.nullcontext():
        return all_reduce(good.astype(jnp.int32), "min") > 0


def _chosen(good: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    def choose(new: PyTree, old: PyTree) -> PyTree:
        kept = optax.tree.where(good, new, old)
        if not isinstance(new, OptimizerState):
            return kept
        return dataclasses.replace(kept, scale=new.scale, skipped=new.skipped)

    return jax.tree.map(choose, new, old, is_leaf=is_optimizer_state)
