"""Modules and training states of other libraries: flax NNX, flax's TrainState, equinox.

Oracles use the same library where it is plain (TrainState, `nnx.Optimizer`); a model
with the library's batch norm is written by hand there.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import replicator
from benchmarks.truth import masks, optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.masks import Mask
from benchmarks.truth.program import CUT, WHOLE, Program, Refused, pair
from benchmarks.truth.supervised import hand_batch_norm, moved_statistics
from benchmarks.truth.tasks import FEATURES, MLP_WEIGHTS, vectors, weights
from replicator.nnx import BatchNorm, params_of, value_and_grad, with_params

NET = weights(40, w1=(FEATURES, 4), w2=(4,))


def batch_of(number: int, mask: Mask | None = None):
    rng = np.random.default_rng(300 + number)
    batch = vectors(rng)
    return batch if mask is None else batch | {"mask": mask(rng)}


class _Net(nnx.Module):
    """A linear layer, a norm and a head; the norm may be left out."""

    def __init__(self, *, normed: bool) -> None:
        self.w1 = nnx.Param(jnp.asarray(NET["w1"]))
        self.w2 = nnx.Param(jnp.asarray(NET["w2"]))
        self.norm = nnx.data(None)
        if normed:
            self.norm = BatchNorm(
                4,
                momentum=0.8,
                epsilon=1e-3,
                rngs=nnx.Rngs(0),
                param_dtype=jnp.result_type(float),
            )

    def __call__(self, x, weight=None):
        y = x @ self.w1[...]
        if self.norm is not None:
            y = self.norm(y, weight=weight)
        return jax.nn.gelu(y) @ self.w2[...]


def _squared(model, batch):
    return (model(batch["x"], batch.get("mask")) - batch["y"]) ** 2


def _same(model):
    return model


def _shifted(batch):
    return batch | {"x": 1 + batch["x"] / 2}


def _norm_program(
    name: str, tx, mask: Mask | None = None, *, again: Any = None, **program: Any
) -> Program:
    """Train a module with the library's norm; its statistics move, too.

    `again` makes of the model what is called a second time, on other examples.
    """

    def make(wrap):
        optimizer = wrap(tx())

        def init(key):
            model = _Net(normed=True)
            return {"model": model, "opt": optimizer.init(params_of(model))}

        return init, optimizer

    def loss_fn(model, batch):
        losses = _squared(model, batch)
        if again is not None:
            losses += _squared(again(model), _shifted(batch))
        if mask is None:
            return losses.mean()
        return replicator.LocalSum((losses * batch["mask"]).sum(), batch["mask"].sum())

    def ours(optimizer):
        def step(state, batch):
            (loss, model), grads = value_and_grad(loss_fn)(state["model"], batch)
            params = params_of(model)
            how = {} if mask is None else {"count": loss.weight}
            updates, opt = optimizer.update(grads, state["opt"], params, **how)
            model = with_params(model, optax.apply_updates(params, updates))
            return {"model": model, "opt": opt}, {"loss": loss}

        return step

    return Program(
        name=name,
        ours=pair(make, ours, lambda *_: None)["ours"],
        oracle=lambda setting: _norm_oracle(tx, setting.microbatches, again),
        batch=lambda number: batch_of(number, mask),
        **program,
    )


def _norm_oracle(tx, pieces: int, again: Any):
    optimizer = optax.with_extra_args_support(tx())

    def init(key):
        affine = {"bias": jnp.zeros(4), "scale": jnp.ones(4)}
        params = {**jax.tree.map(jnp.asarray, NET), "norm": affine}
        moments = {
            "mean": jnp.zeros(4, jnp.float32),
            "var": jnp.ones(4, jnp.float32),
        }
        model = {**params, "norm": affine | moments}
        return {"model": model, "opt": optimizer.init(params)}

    def one(params, batch):
        weight = batch.get("mask", jnp.ones_like(batch["y"]))
        y, mean, var = hand_batch_norm(
            batch["x"] @ params["w1"], weight, lambda leaf: leaf
        )
        y = y * params["norm"]["scale"] + params["norm"]["bias"]
        losses = (jax.nn.gelu(y) @ params["w2"] - batch["y"]) ** 2
        return (losses * weight).sum(), weight.sum(), {"mean": mean, "var": var}

    def loss_fn(params, batch):
        cut = jax.tree.map(
            lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), batch
        )
        total, count, moments = jax.vmap(one, in_axes=(None, 0))(params, cut)
        moved = [moments]
        if again is not None:
            more, _, moments = jax.vmap(one, in_axes=(None, 0))(params, _shifted(cut))
            total, moved = total + more, [*moved, moments]
        return total.sum() / count.sum(), (
            count,
            moved if again is _same else moved[:1],
        )

    @cut_by(pieces)
    def step(state, batch):
        norm = state["model"]["norm"]
        affine = {name: norm[name] for name in ("bias", "scale")}
        params = {**state["model"], "norm": affine}
        (loss, (count, calls)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, batch
        )
        updates, opt = optimizer.update(grads, state["opt"], params)
        after: Any = optax.apply_updates(params, updates)
        moved = {name: norm[name] for name in ("mean", "var")}
        for moments in calls:
            moved = {
                name: moved_statistics(moved[name], new, count, last=False)
                for name, new in moments.items()
            }
        after = after | {"norm": after["norm"] | moved}
        return {"model": after, "opt": opt}, {"loss": loss}

    return init, step


def _nnx_optimizer(name: str, tx, mask: Mask | None) -> Program:
    """Keep an `nnx.Optimizer` in the state, which updates in place."""

    def make(wrap):
        optimizer = wrap(tx())

        def init(key):
            model = _Net(normed=False)
            return {
                "model": model,
                "optimizer": nnx.Optimizer(model, optimizer, wrt=nnx.Param),
            }

        return init, optimizer

    def step_of(loss_of, how_of):
        def step(state, batch):
            model, optimizer = state["model"], state["optimizer"]
            loss, grads = nnx.value_and_grad(loss_of)(model, batch)
            loss, how = how_of(loss, batch)
            optimizer.update(model, grads, **how)
            return {"model": model, "optimizer": optimizer}, {"loss": loss}

        return step

    def mean(model, batch):
        weight = batch.get("mask", jnp.ones_like(batch["y"]))
        return (_squared(model, batch) * weight).sum() / jnp.maximum(
            weight.sum(), 1e-30
        )

    def weighted(loss, batch):
        if mask is None:
            return loss, {}
        count = batch["mask"].sum()
        return replicator.Mean(loss, count), {"weight": count}

    return Program(
        name=name,
        batch=lambda number: batch_of(number, mask),
        **pair(
            make,
            lambda optimizer: step_of(mean, weighted),
            lambda setting, optimizer: cut_by(())(
                step_of(mean, lambda loss, batch: (loss, {}))
            ),
        ),
    )


def _mlp_losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] - batch["y"]) ** 2


def _mean_loss(params, batch):
    weight = batch.get("mask", jnp.ones_like(batch["y"]))
    total = (_mlp_losses(params, batch) * weight).sum()
    return total / jnp.maximum(weight.sum(), 1e-30)


def train_state(name: str, tx, mask: Mask | None) -> Program:
    """Let flax's TrainState be the state: `step` counts updates."""

    def make(wrap):
        optimizer = wrap(tx())

        def init(key):
            params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
            # An array from the start: a Python number would change the state's types.
            state = TrainState.create(apply_fn=_mlp_losses, params=params, tx=optimizer)
            return state.replace(step=jnp.zeros((), jnp.int32))

        return init, optimizer

    def applied(state, batch):
        loss, grads = jax.value_and_grad(_mean_loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def weighted(state, batch):
        loss, grads = jax.value_and_grad(_mean_loss)(state.params, batch)
        count = batch["mask"].sum()
        updates, opt = state.tx.update(
            grads, state.opt_state, state.params, weight=count
        )
        params = optax.apply_updates(state.params, updates)
        after = state.replace(step=state.step + 1, params=params, opt_state=opt)
        return after, {"loss": replicator.Mean(loss, count)}

    return Program(
        name=name,
        batch=lambda number: batch_of(number, mask),
        **pair(
            make,
            lambda optimizer: applied if mask is None else weighted,
            lambda setting, optimizer: cut_by(())(lambda s, b: applied(s, b)),
        ),
    )


def _equinox(name: str, tx, mask: Mask) -> Program:
    """Train an equinox model: arrays in the state, the rest closed over."""
    import equinox as eqx  # an optional package

    def parts():
        model = eqx.nn.MLP(FEATURES, 1, 6, 2, key=jax.random.key(0))
        return eqx.partition(model, eqx.is_array)

    def make(wrap):
        optimizer = wrap(tx())

        def init(key):
            params, _ = parts()
            return {"params": params, "opt": optimizer.init(params)}

        return init, optimizer

    def total(params, batch):
        model = eqx.combine(params, parts()[1])
        losses = (jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    def stepped(optimizer, take, how_of):
        def step(state, batch):
            loss, grads = take(state["params"], batch)
            updates, opt = optimizer.update(
                grads, state["opt"], state["params"], **how_of(loss)
            )
            params = eqx.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": loss}

        return step

    def ours(optimizer):
        take = replicator.value_and_grad(
            lambda params, batch: replicator.LocalSum(*total(params, batch))
        )
        return stepped(optimizer, take, lambda loss: {"count": loss.weight})

    def oracle(setting, optimizer):
        def mean(params, batch):
            whole, count = total(params, batch)
            return whole / count

        take = jax.value_and_grad(mean)
        return cut_by(())(stepped(optimizer, take, lambda loss: {}))

    return Program(
        name=name,
        batch=lambda number: batch_of(number, mask),
        **pair(make, ours, oracle),
    )


PROGRAMS = [
    _norm_program("nnx-norm-mean", optimizers.adam, None),
    _norm_program("nnx-norm-scattered-count", optimizers.clipped_adam, masks.scattered),
    _norm_program("nnx-norm-padding-count", optimizers.momentum, masks.padded),
    _norm_program("nnx-norm-twice", optimizers.adam, again=_same, settings=WHOLE),
    _norm_program("nnx-norm-twice-on-a-copy", optimizers.adam, again=nnx.clone),
    _norm_program(
        "nnx-norm-twice-refused",
        optimizers.adam,
        again=_same,
        settings=CUT,
        expect=Refused(by="ArgumentError", word="running statistics twice"),
    ),
    _nnx_optimizer("nnx-optimizer-mean", optimizers.adam, None),
    _nnx_optimizer("nnx-optimizer-weight", optimizers.adamw_schedule, masks.scattered),
    train_state("train-state-mean", optimizers.adamw_schedule, None),
    train_state("train-state-weight", optimizers.clipped_adam, masks.padded),
]
if importlib.util.find_spec("equinox"):
    PROGRAMS += [
        _equinox("equinox-scattered-count", optimizers.adam, masks.scattered),
        _equinox("equinox-padding-count", optimizers.clipped_adam, masks.padded),
    ]
