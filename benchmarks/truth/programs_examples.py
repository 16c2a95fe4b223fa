"""Programs that tell examples apart: a gradient, noise, or a row for each of them.

`optax.contrib.dpsgd` clips the gradient of each example, then adds noise to their sum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth import masks, optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import (
    ALL,
    CUT,
    WHOLE,
    Program,
    Refused,
    Same,
    Setting,
    Warned,
)
from benchmarks.truth.tasks import FEATURES, MLP_WEIGHTS, ROWS, vectors
from replicator import strategies

_CLIP, _NOISE = 0.5, 0.3
_SEVERAL = ALL[1:]


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


def _noise_of_private() -> optax.GradientTransformation:
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
    tx = rep.wrap_optimizer(optax.chain(_noise_of_private(), optax.sgd(0.2)))

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


def _normal(key, *shape):
    return jax.random.normal(key, shape)


def _noise_by_key(key, x):
    """Draw noise for the examples of `x` from a key of each."""
    keys = replicator.example_keys(key, len(x))
    return jax.vmap(lambda own: _normal(own, FEATURES))(keys)


def _noise_by_place(key, x):
    """Take noise for the examples of `x` from a table for the global batch."""
    return _normal(key, ROWS, FEATURES)[replicator.example_places(len(x))]


def _drawn_at_once(key, x):
    """Draw noise for all examples that are here: wrong where those are not all."""
    return _normal(key, *x.shape)


def _noisy(tx, draw):
    def step(state, batch, key):
        noisy = batch | {"x": batch["x"] + 0.3 * draw(key, batch["x"])}
        loss, grads = jax.value_and_grad(_loss)(state["params"], noisy)
        return _moved(tx, state, grads), {"loss": loss}

    return step


def _noise(name: str, draw: Callable, *, warned: bool = False, **more) -> Program:
    """Train on examples with noise, which is to be that of the whole batch."""

    def ours(rep, setting):
        del setting
        tx = rep.wrap_optimizer(optimizers.adam())
        return _init_of(tx), _noisy(tx, draw)

    def oracle(setting):
        del setting
        tx = optimizers.adam()
        return _init_of(tx), cut_by(())(_noisy(tx, draw))

    expect = Warned(by="SharedRandomKeyWarning", word="microbatch draws the same")
    return Program(
        name=f"noise-{name}",
        ours=ours,
        oracle=None if warned else oracle,
        batch=_batch,
        keyed=True,
        expect=expect if warned else Same(),
        **more,
    )


def _rows(name: str, report: Callable, *, refused: bool = False, **more) -> Program:
    """Report a loss for each example, as `report` declares it."""

    def parts(tx, declare):
        def step(state, batch):
            grads = jax.grad(_loss)(state["params"], batch)
            losses = (batch["x"] @ state["params"]["w1"]).sum(1) - batch["y"]
            return _moved(tx, state, grads), {"loss": declare(losses)}

        return _init_of(tx), cut_by(())(step)

    return Program(
        name=f"rows-{name}",
        ours=lambda rep, setting: parts(rep.wrap_optimizer(optimizers.adam()), report),
        oracle=lambda setting: parts(optimizers.adam(), lambda losses: losses),
        batch=_batch,
        expect=_NO_ROWS if refused else Same(),
        **more,
    )


def _valued(name: str, tx: Callable, **more) -> Program:
    """Hand the mean loss of unequal parts to an optimizer that asks for it."""

    def totals(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
        losses = (hidden @ params["w2"] - batch["y"]) ** 2
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    def ours(rep, setting):
        del setting
        wrapped = rep.wrap_optimizer(tx())
        take = replicator.value_and_grad(
            lambda params, batch: replicator.LocalSum(*totals(params, batch))
        )

        def step(state, batch):
            loss, grads = take(state["params"], batch)
            how = {"value": loss.value, "count": loss.weight}
            return _moved(wrapped, state, grads, **how), {"loss": loss}

        return _init_of(wrapped), step

    def oracle(setting):
        del setting
        plain = tx()

        @cut_by(())
        def step(state, batch):
            def mean(params):
                total, count = totals(params, batch)
                return total / count

            loss, grads = jax.value_and_grad(mean)(state["params"])
            return _moved(plain, state, grads, value=loss), {"loss": loss}

        return _init_of(plain), step

    def masked(number):
        rng = np.random.default_rng(950 + number)
        return _batch(number) | {"mask": masks.padded(rng)}

    return Program(name=f"value-{name}", ours=ours, oracle=oracle, batch=masked, **more)


def _plateau():
    plateau = optax.contrib.reduce_on_plateau(0.5, patience=0)
    return optax.chain(optax.sgd(0.2), plateau)


def _polyak():
    return optax.polyak_sgd(max_learning_rate=0.5)


_NO_ROWS = Refused(by="ArgumentError", word="reduce `loss` over its examples")
_FSDP = {"strategy": strategies.fsdp()}
_ZERO1 = {"strategy": strategies.zero1()}
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
    _valued("plateau", _plateau),
    _valued("polyak-fsdp", _polyak, options=_FSDP),
    _rows("concat", replicator.Concat),
    _rows("alone", lambda losses: losses, settings=WHOLE, options=_FSDP),
    _rows("plain-refused", lambda losses: losses, refused=True, settings=_SEVERAL),
    _rows("mean-refused", replicator.Mean, refused=True, options=_FSDP, settings=CUT),
    _noise("by-key-fsdp", _noise_by_key, options=_FSDP),
    _noise("by-place", _noise_by_place),
    _noise("by-place-zero1", _noise_by_place, options=_ZERO1),
    _noise("whole-batch-fsdp", _drawn_at_once, options=_FSDP, settings=WHOLE),
    _noise(
        "shared-fsdp-warned", _drawn_at_once, warned=True, options=_FSDP, settings=CUT
    ),
]
