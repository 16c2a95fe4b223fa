"""Programs that are wrong, and must be refused by name, or warned of; and their twins.

What a refusal names is looked for in its message: the leaf, the argument or the remedy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth import optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import (
    CUT,
    WHOLE,
    Program,
    Refused,
    Setting,
    Warned,
    pair,
)
from benchmarks.truth.tasks import FEATURES, MLP_WEIGHTS, ROWS, vectors

_SEVERAL = (Setting(2, 2), Setting(4, 1))
_SPREAD = WHOLE[1:]


def _batch(number: int, short: int = 0):
    """Return a batch; with `short`, the second one lacks so many examples."""
    batch = vectors(np.random.default_rng(700 + number))
    if not short:
        return batch
    return batch | {"mask": np.arange(ROWS) < ROWS - short * number}


def _losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] - batch["y"]) ** 2


def _mean_loss(params, batch):
    return _losses(params, batch).mean()


def _step(optimizer, loss_fn=_mean_loss):
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return _applied(optimizer, state, grads), {"loss": loss}

    return step


def _applied(optimizer, state, grads, **how):
    updates, opt = optimizer.update(grads, state["opt"], state["params"], **how)
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt}


def _refused(
    name: str,
    step_of: Callable,
    expect: Refused | Warned,
    *,
    wrapped: bool = True,
    more: Callable = dict,
    short: int = 0,
    **program: Any,
) -> Program:
    """Make a program that needs no oracle."""

    def ours(rep, setting):
        del setting
        optimizer = optimizers.adam()
        optimizer = rep.wrap_optimizer(optimizer) if wrapped else optimizer

        def init(key):
            params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
            return {"params": params, "opt": optimizer.init(params), **more()}

        return init, step_of(optimizer)

    settings: dict[str, Any] = {"settings": _SEVERAL} | program
    return Program(
        name=name,
        ours=ours,
        batch=lambda number: _batch(number, short),
        expect=expect,
        **settings,
    )


def _beside(optimizer):
    """Move a temperature by a plain optimizer, as in SAC."""
    plain = optax.adam(0.1)

    def step(state, batch):
        after, metrics = _step(optimizer)(state, batch)
        slope = replicator.all_reduce(
            jax.grad(lambda t: (t * _losses(state["params"], batch)).mean())(
                state["temperature"]
            )
        )
        updates, moved = plain.update(slope, state["plain"])
        temperature = state["temperature"] + updates
        return after | {"temperature": temperature, "plain": moved}, metrics

    return step


def _beside_state():
    temperature = jnp.ones(())
    return {"temperature": temperature, "plain": optax.adam(0.1).init(temperature)}


def _own_place(optimizer):
    def step(state, batch):
        after, metrics = _step(optimizer)(state, batch)
        return after | {"place": replicator.replica_id()}, metrics

    return step


def _twice(optimizer):
    def step(state, batch):
        after, _ = _step(optimizer)(state, batch)
        return _step(optimizer)(after, batch)

    return step


def _in_scan(optimizer):
    def step(state, batch):
        def turn(state, _):
            return _step(optimizer)(state, batch)

        after, metrics = jax.lax.scan(turn, state, None, length=2)
        return after, jax.tree.map(lambda leaf: leaf[0], metrics)

    return step


def _metric_only(optimizer):
    """Weigh the metric by the mask, and not the gradient."""

    def step(state, batch):
        after, _ = _step(optimizer)(state, batch)
        losses, count = _losses(state["params"], batch), batch["mask"].sum()
        mean = (losses * batch["mask"]).sum() / jnp.maximum(count, 1)
        return after, {"loss": replicator.Mean(mean, count)}

    return step


def _reduced_sum(optimizer):
    """Reduce the sum that is to be this replica's own."""

    def loss_fn(params, batch):
        losses = _losses(params, batch)
        total = replicator.all_reduce(losses.sum(), "sum")
        return replicator.LocalSum(total, float(len(losses)))

    def step(state, batch):
        loss, grads = replicator.value_and_grad(loss_fn)(state["params"], batch)
        return _applied(optimizer, state, grads, count=loss.weight), {"loss": loss}

    return step


def _integers(optimizer):
    def step(state, batch):
        params = state["params"] | {"n": jnp.arange(3)}

        def loss_fn(params):
            return _mean_loss(params, batch)

        grads = jax.grad(loss_fn, allow_int=True)(params)
        updates, _ = optimizer.update(grads, state["opt"], params)
        del updates["n"]
        return {**state, "params": updates}, {}

    return step


def _local_right_side(optimizer):
    """Iterate until this replica's own residual is small: others wait for ever."""

    def step(state, batch):
        def matvec(v):
            return replicator.all_reduce(batch["x"].T @ (batch["x"] @ v), "sum") + v

        found, _ = jax.scipy.sparse.linalg.cg(matvec, batch["x"].T @ batch["y"])
        after, metrics = _step(optimizer)(state, batch)
        return after | {"found": replicator.all_reduce(found)}, metrics

    return step


def _noise_in_loss(optimizer):
    """Draw one mask for all replicas' examples from the key that they share."""

    def step(state, batch, key):
        def loss_fn(params, batch):
            kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
            return _mean_loss(params, batch | {"x": jnp.where(kept, batch["x"], 0)})

        return _step(optimizer, loss_fn)(state, batch)

    return step


def _shared_latents(optimizer):
    """Train on made examples alone, which every replica makes alike."""

    def step(state, batch, key):
        made = jax.random.normal(key, (len(batch["x"]), FEATURES))

        def loss_fn(params, batch):
            return _mean_loss(params, {"x": made, "y": jnp.zeros(len(made))})

        return _step(optimizer, loss_fn)(state, batch)

    return step


def _key_metric(optimizer):
    def step(state, batch, key):
        after, _ = _step(optimizer)(state, batch)
        return after, {"key": key}

    return step


def _alternating(optimizer):
    """Take the second player's gradient after the first one's update."""
    other = replicator.wrap_optimizer(optax.sgd(0.1), name="other")

    def step(state, batch):
        after, metrics = _step(optimizer)(state, batch)

        def loss_fn(own):
            return (own * _losses(after["params"], batch)).mean()

        slope = jax.grad(loss_fn)(state["other"])
        updates, opt = other.update(slope, state["other_opt"], state["other"])
        moved = {"other": state["other"] + updates, "other_opt": opt}
        return after | moved, metrics

    return step


def _alternating_state():
    other = jnp.ones(())
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1), name="other")
    return {"other": other, "other_opt": optimizer.init(other)}


def _noise_by_part() -> Program:
    """Add noise that differs by replica and microbatch, by `replica_key`."""

    def make(wrap):
        optimizer = wrap(optimizers.adam())

        def init(key):
            params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
            return {"params": params, "opt": optimizer.init(params)}

        return init, optimizer

    def ours(optimizer):
        def step(state, batch, key):
            own = replicator.replica_key(key)
            noise = jax.random.normal(own, batch["x"].shape) * 0.3
            return _step(optimizer)(state, batch | {"x": batch["x"] + noise})

        return step

    def oracle(setting, optimizer):
        n, k = setting

        def drawn(key, part):
            own = jax.random.fold_in(jax.random.fold_in(key, part // n), part % n)
            return jax.random.normal(own, (ROWS // (n * k), FEATURES)) * 0.3

        @cut_by(setting)
        def step(state, batch, key):
            parts = jax.vmap(lambda part: drawn(key, part))(jnp.arange(n * k))
            noise = parts.reshape(batch["x"].shape)
            return _step(optimizer)(state, batch | {"x": batch["x"] + noise})

        return step

    return Program(
        name="noise-by-replica-key",
        batch=_batch,
        keyed=True,
        **pair(make, ours, oracle),
    )


def _argument(word: str) -> Refused:
    return Refused(by="ArgumentError", word=word)


PROGRAMS = [
    _noise_by_part(),
    _refused(
        "unwrapped-optimizer-refused",
        _step,
        Refused(by="ReplicationError", word="may differ between replicas"),
        wrapped=False,
        settings=_SPREAD,
    ),
    _refused(
        "own-place-in-state-refused",
        _own_place,
        Refused(by="ReplicationError", word="`place` may differ"),
        more=lambda: {"place": jnp.zeros((), jnp.int32)},
        settings=_SPREAD,
    ),
    _refused(
        "plain-optimizer-beside-refused",
        _beside,
        _argument("outside of a wrapped optimizer"),
        more=_beside_state,
        settings=CUT,
    ),
    _refused("update-twice-refused", _twice, _argument("`update`"), settings=CUT),
    _refused("update-in-scan-refused", _in_scan, _argument("scan"), settings=CUT),
    _refused(
        "alternating-players-refused",
        _alternating,
        _argument("gradients depend on an update"),
        more=_alternating_state,
        settings=CUT,
    ),
    _refused(
        "integer-gradients-refused", _integers, _argument("`grads`"), settings=CUT
    ),
    _refused(
        "padding-in-metric-alone-refused",
        _metric_only,
        Refused(by="BatchError", word="mask"),
        short=3,
        drive="padded",
        updates=2,
    ),
    _refused(
        "reduced-sum-refused",
        _reduced_sum,
        Refused(by="ReplicationError", word="reduced over replicas already"),
    ),
    _refused(
        "cg-local-right-side-refused",
        _local_right_side,
        Refused(by="ReplicationError", word="loop that may differ between"),
        more=lambda: {"found": jnp.zeros(FEATURES)},
        settings=_SPREAD,
    ),
    _refused("key-metric-refused", _key_metric, _argument("metrics"), keyed=True),
    _refused(
        "shared-dropout-warned",
        _noise_in_loss,
        Warned(by="SharedRandomKeyWarning", word="same random numbers"),
        keyed=True,
    ),
    _refused(
        "shared-latents-warned",
        _shared_latents,
        Warned(by="SharedRandomKeyWarning", word="same random numbers"),
        keyed=True,
    ),
]
