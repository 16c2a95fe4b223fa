"""Programs that tell examples apart: private gradients, a gradient for each of them.

`optax.contrib.dpsgd` clips the gradient of each example, then adds noise to their sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import CUT, WHOLE, Program, Refused, Setting, pair
from benchmarks.truth.tasks import MLP_WEIGHTS, ROWS, vectors
from replicator import strategies

_CLIP, _NOISE = 0.5, 0.3


def _batch(number: int):
    return vectors(np.random.default_rng(900 + number))


def _loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return ((hidden @ params["w2"] - batch["y"]) ** 2).mean()


def _by_example(params, batch):
    """Return the gradient of each example: leaves [examples, ...]."""
    rows = jax.tree.map(lambda leaf: leaf[:, None], batch)
    return jax.vmap(jax.grad(_loss), (None, 0))(params, rows)


def _private():
    aggregate = optax.contrib.differentially_private_aggregate(
        _CLIP, _NOISE, key=jax.random.key(11)
    )
    return optax.chain(aggregate, optax.sgd(0.2))


def _noise() -> optax.GradientTransformation:
    """Add the noise of `_private` to the mean of gradients that are clipped."""

    def init(params):
        del params
        return optax.contrib.DifferentiallyPrivateAggregateState(jax.random.key(11))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, treedef = jax.tree.flatten(grads)
        after, *keys = jax.random.split(state.rng_key, len(leaves) + 1)
        noised = [
            leaf
            + _CLIP * _NOISE * jax.random.normal(key, leaf.shape, leaf.dtype) / ROWS
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        return treedef.unflatten(noised), state._replace(rng_key=after)

    transform: Any = update
    return optax.GradientTransformation(init, transform)


def _moved(tx, state, grads, **how):
    updates, opt = tx.update(grads, state["opt"], state["params"], **how)
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def _init_of(optimizer):
    def init(key):
        params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
        return {"params": params, "opt": optimizer.init(params)}

    return init


def _oracle(setting: Setting) -> tuple:
    del setting
    tx = _private()

    @cut_by(())
    def step(state, batch):
        return _moved(tx, state, _by_example(state["params"], batch)), {}

    return _init_of(tx), step


def _clipped_in_step(rep, setting):
    del setting
    tx = rep.wrap_optimizer(optax.chain(_noise(), optax.sgd(0.2)))

    def step(state, batch):
        grads, treedef = jax.tree.flatten(_by_example(state["params"], batch))
        sums, _ = optax.per_example_global_norm_clip(grads, _CLIP)
        return _moved(tx, state, treedef.unflatten(sums), count=len(batch["y"])), {}

    return _init_of(tx), step


def _outside_of_wrap(rep, setting):
    del rep, setting
    tx = _private()

    def step(state, batch):
        grads = _by_example(state["params"], batch)
        return _moved(tx, state, replicator.all_gather(grads, tiled=True)), {}

    return _init_of(tx), step


def _wrapped(rep, setting):
    del setting
    tx = rep.wrap_optimizer(_private())

    def step(state, batch):
        return _moved(tx, state, _by_example(state["params"], batch)), {}

    return _init_of(tx), step


_FSDP = {"strategy": strategies.fsdp()}
_PER_EXAMPLE = Refused(by="ArgumentError", word="shapes of the parameters")

PROGRAMS = [
    Program(name="dp-sgd-count", ours=_clipped_in_step, oracle=_oracle, batch=_batch),
    Program(
        name="dp-sgd-count-fsdp",
        ours=_clipped_in_step,
        oracle=_oracle,
        batch=_batch,
        options=_FSDP,
    ),
    Program(
        name="dp-sgd-outside-of-wrap",
        ours=_outside_of_wrap,
        oracle=_oracle,
        batch=_batch,
        settings=WHOLE,
    ),
    Program(name="dp-sgd-refused", ours=_wrapped, batch=_batch, expect=_PER_EXAMPLE),
]
