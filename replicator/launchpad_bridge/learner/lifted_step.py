"""The user's step as the learner runs it: with policy lag, and with earlier variables.

A batch of the learner is {"trajectories": the user's batch, "version": int32 [B], of
the policy that acted}. The user's step takes the trajectories; those of a replay table
come with a "probability", float32 [B], and the step takes all three.

Where actors take turns their batch k is acted with version k − lag: a learner that goes
on from a checkpoint must publish versions that it had before, so the state holds them.
A replay table of turns may not have got the priorities of the last batches yet: the
state holds them, too, float32 [priority_lag, B], NaN before there are as many batches.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from replicator import Concat, Max, Mean, Sum, all_gather, step_number
from replicator.base.trees import describe
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.errors import ArgumentError

VariablesOf = Callable[[PyTree], dict[str, PyTree]]
"""Returns the variables for actors of a state, by name; it may be traced."""

LAG_BINS = 16
"""The last bin of the histogram holds all lags from here on."""
ROWS = "priority_rows"
"""Metric that the priorities are in, [B, 1], in the order of the batch."""


class Lifted(NamedTuple):
    """Functions that a session runs in place of the user's.

    Attributes:
      init_fn: Returns the session's state for a key.
      step_fn: Makes an update.
      user_state: Returns the user's state in the session's state.
      earlier: Returns earlier variables by version, for a state and its version.
      priorities: Returns those of the last batches, [priority_lag, B]; None if the
        state does not hold them.
    """

    init_fn: InitFn
    step_fn: StepFn
    user_state: Callable[[PyTree], PyTree]
    earlier: Callable[[PyTree, int], dict[int, dict[str, PyTree]]]
    priorities: Callable[[PyTree], jax.Array | None] = lambda state: None


def lifted(
    init_fn: InitFn,
    step_fn: StepFn,
    variables: VariablesOf,
    *,
    earlier: int,
    priorities: str | None = None,
    kept: tuple[int, int] = (0, 0),
) -> Lifted:
    """Return the functions that the learner's session runs.

    Args:
      init_fn: The user's function.
      step_fn: The user's step; takes trajectories as its batch.
      variables: Returns the variables for actors of the user's state.
      earlier: Number of versions to keep before the newest.
      priorities: Name of the metric with the examples' priorities. The session has the
        rows as `ROWS`, and their mean under that name: hooks and records get a number.
      kept: Number of batches whose priorities the state holds, and of their examples.
    """
    inner = _of_batches(step_fn, priorities)
    if not earlier and not kept[0]:
        return Lifted(
            init_fn=init_fn,
            step_fn=inner,
            user_state=lambda state: state,
            earlier=lambda state, newest: {},
        )

    def init(key: jax.Array) -> PyTree:
        state = init_fn(key)
        held = {"state": state}
        if earlier:
            held["earlier"] = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (earlier, *jnp.shape(x))),
                variables(state),
            )
        if kept[0]:
            held["priorities"] = jnp.full(kept, jnp.nan, jnp.float32)
        return held

    @functools.wraps(step_fn)  # its signature shows if it takes a key
    def step(held: PyTree, batch: PyTree, *key: jax.Array) -> tuple[PyTree, PyTree]:
        state, metrics = inner(held["state"], batch, *key)
        after = {"state": state}
        if earlier:
            after["earlier"] = jax.tree.map(
                lambda all_, new: jnp.concatenate([all_[1:], new[None]]),
                held["earlier"],
                variables(held["state"]),
            )
        if kept[0]:
            # Of this microbatch; it is cut over replicas in their order.
            rows = all_gather(metrics[ROWS].value, tiled=True)[:, 0]
            flat = jnp.concatenate([held["priorities"].reshape(-1)[len(rows) :], rows])
            after["priorities"] = flat.reshape(kept)
        return after, metrics

    def versions(held: PyTree, newest: int) -> dict[int, dict[str, PyTree]]:
        return {
            newest - age: jax.tree.map(lambda x, age=age: x[-age], held["earlier"])
            for age in range(1, min(earlier, newest) + 1)
        }

    return Lifted(
        init_fn=init,
        step_fn=step,
        user_state=lambda held: held["state"],
        earlier=versions,
        priorities=lambda held: held.get("priorities"),
    )


def _of_batches(step_fn: StepFn, priorities: str | None) -> StepFn:
    """Return a step that takes a batch of the learner, with policy lag as metrics."""

    @functools.wraps(step_fn)
    def step(state: PyTree, batch: PyTree, *key: jax.Array) -> tuple[PyTree, PyTree]:
        given = batch if "probability" in batch else batch["trajectories"]
        state, metrics = step_fn(state, given, *key)
        metrics = _joined(metrics, _lag_metrics(batch["version"]))
        if priorities is not None:
            metrics |= _priority_metrics(priorities, metrics, len(batch["version"]))
        return state, metrics

    return step


def _joined(metrics: Any, lags: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(metrics, Mapping) or lags.keys() & metrics.keys():
        found = ", ".join(metrics) if isinstance(metrics, Mapping) else type(metrics)
        raise ArgumentError(
            "`step_fn` must return a dict of metrics, none of them called "
            f"{', '.join(lags)}, got {found}. Name each metric."
        )
    return {**metrics, **lags}


def _lag_metrics(version: jax.Array) -> dict[str, Any]:
    """Return metrics of the number of updates that a batch's trajectories missed."""
    # Rows of a replay table may be of updates that a learner has yet to make again.
    lag = jnp.maximum(step_number() - version, 0)
    binned = jnp.minimum(lag, LAG_BINS - 1)
    counts = jnp.sum(jax.nn.one_hot(binned, LAG_BINS, dtype=jnp.float32), axis=0)
    return {
        "policy_lag": Mean(jnp.mean(lag.astype(jnp.float32)), jnp.float32(lag.size)),
        "policy_lag_max": Max(jnp.max(lag)),
        "policy_lag_histogram": Sum(counts),
    }


def _priority_metrics(name: str, metrics: dict[str, Any], examples: int) -> PyTree:
    """Return the priorities as rows, and as their mean, which is NaN if one is."""
    metric = metrics.get(name)
    if not isinstance(metric, Concat) or jnp.shape(metric.value) != (examples,):
        found = f"a {type(metric).__name__}" if name in metrics else "none"
        if isinstance(metric, Concat):
            found = f"a Concat of {describe(metric.value)}"
        raise ArgumentError(
            f"`priorities` must name a metric with one number per example, {examples} "
            f"here, got {found} for {name!r}. Return "
            f'`{{"{name}": replicator.Concat(values)}}`.'
        )
    # A vector would be written to records entry by entry.
    mean = Mean(jnp.mean(metric.value), jnp.float32(examples))
    return {name: mean, ROWS: Concat(metric.value[:, None].astype(jnp.float32))}
