"""Losses of several sums, each over its own count; and sums that must be refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth import masks, optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import Program, Refused, Setting, pair
from benchmarks.truth.tasks import MLP_WEIGHTS, ROWS, vectors

Part = tuple[jax.Array, jax.Array, float]  # losses, what they count, and a factor


def _batch(number: int, mask: Callable = masks.scattered) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(900 + number)
    batch = vectors(rng)
    tokens = rng.normal(size=(ROWS, 6))
    length = rng.integers(2, 7, ROWS)
    real = (np.arange(6) < length[:, None]).astype(np.float32)
    return batch | {"mask": mask(rng), "tokens": tokens, "real": real}


def _hidden(params, batch):
    return jnp.tanh(batch["x"] @ params["w1"] + params["b1"])


def _policy_and_value(params, batch) -> list[Part]:
    """Return two losses of one trunk; values are learned where y is large alone."""
    score = _hidden(params, batch) @ params["w2"]
    seen = (batch["y"] > 0.2).astype(score.dtype)
    policy = jax.nn.softplus(-score * batch["y"]) * batch["mask"]
    return [(policy, batch["mask"], 1.0), ((score - batch["y"]) ** 2 * seen, seen, 0.5)]


def _several_tokens(params, batch) -> list[Part]:
    """Predict the next token, and those after it: fewer have one each time."""
    score = _hidden(params, batch) @ params["w2"]
    parts = []
    for ahead in (1, 2, 3):
        real = batch["real"][:, ahead:]
        guess = score[:, None] * batch["tokens"][:, :-ahead]
        parts.append(
            ((guess - batch["tokens"][:, ahead:]) ** 2 * real, real, 1 / ahead)
        )
    return parts


def _with_a_mean(params, batch) -> list[Part]:
    """Add a loss of all examples to one of those that a mask keeps."""
    [first, _] = _policy_and_value(params, batch)
    far = jnp.abs(_hidden(params, batch)).sum(1)
    return [first, (far, jnp.ones_like(far), 0.1)]


def _make(tx: Callable) -> Callable:
    def make(wrap):
        optimizer = wrap(tx())

        def init(key):
            params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
            return {"params": params, "opt": optimizer.init(params)}

        return init, optimizer

    return make


def _moved(optimizer: Any, state: Any, grads: Any) -> dict[str, Any]:
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def _ours(parts_of: Callable) -> Callable:
    def loss_fn(params, batch):
        first, *others = (
            by * replicator.LocalSum(losses.sum(), count.sum())
            for losses, count, by in parts_of(params, batch)
        )
        for each in others:
            first = first + each
        return first

    def of(optimizer):
        def step(state, batch):
            loss, grads = replicator.value_and_grad(loss_fn)(state["params"], batch)
            return _moved(optimizer, state, grads), {"loss": loss}

        return step

    return of


def _oracle(parts_of: Callable) -> Callable:
    def loss_fn(params, batch):
        return sum(
            by * losses.sum() / jnp.maximum(count.sum(), 1e-30)
            for losses, count, by in parts_of(params, batch)
        )

    def of(setting, optimizer):
        @cut_by(None)
        def step(state, batch):
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
            return _moved(optimizer, state, grads), {"loss": loss}

        return step

    return of


_TABLE = [
    ("policy-and-value", _policy_and_value, optimizers.clipped_adam, masks.scattered),
    ("policy-and-value-empty", _policy_and_value, optimizers.adam, masks.empty_replica),
    ("several-tokens", _several_tokens, optimizers.adamw_schedule, masks.scattered),
    ("one-of-all-examples", _with_a_mean, optimizers.momentum, masks.padded),
]


def _reduced_count(params, batch):
    """Count the examples of all replicas behind the sum of one."""
    [(losses, _, _), _] = _policy_and_value(params, batch)
    return replicator.LocalSum(
        losses.sum(), replicator.all_reduce(batch["mask"].sum(), "sum")
    )


def _own_times_global(params, batch):
    """Multiply each replica's own loss by the loss of all."""

    def local_sum(params):
        losses, mask, _ = _policy_and_value(params, batch)[0]
        return replicator.LocalSum(losses.sum(), mask.sum())

    own = local_sum(params)
    whole = replicator.global_loss(local_sum)(params)
    return replicator.LocalSum(own.value * whole, own.count)


def _summed_step(optimizer):
    """Add gradients up as code of the days of pmap does."""

    def loss_fn(params, batch):
        return (_hidden(params, batch) @ params["w2"]).mean()

    def step(state, batch):
        grads = jax.grad(loss_fn)(state["params"], batch)
        return _moved(optimizer, state, replicator.all_reduce(grads, "sum")), {}

    return step


def _counted(loss_fn: Callable) -> Callable:
    def of(optimizer):
        def step(state, batch):
            loss, grads = replicator.value_and_grad(loss_fn)(state["params"], batch)
            updates, opt = optimizer.update(grads, state["opt"], count=loss.weight)
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": loss}

        return step

    return of


def _refused(name: str, step_of: Callable, word: str) -> Program:
    def ours(rep, setting):
        del setting
        init, optimizer = _make(optimizers.adam)(rep.wrap_optimizer)
        return init, step_of(optimizer)

    return Program(
        name=f"{name}-refused",
        ours=ours,
        batch=_batch,
        expect=Refused(by="ReplicationError", word=word),
        settings=(Setting(2, 2), Setting(4, 1)),
    )


PROGRAMS = [
    *(
        Program(
            name=f"sums-{name}",
            batch=lambda number, mask=mask: _batch(number, mask),
            **pair(_make(tx), _ours(parts), _oracle(parts)),
        )
        for name, parts, tx, mask in _TABLE
    ),
    _refused("reduced-count", _counted(_reduced_count), "the count of this replica's"),
    _refused("own-times-global", _counted(_own_times_global), "`global_loss` must"),
    _refused("summed-gradients", _summed_step, "must be a mean over replicas"),
]
