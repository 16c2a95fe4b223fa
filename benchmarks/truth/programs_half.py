"""Half precision: what is computed, kept or reported in 16 bits, and in 8.

Tolerances are of how far parameters moved in three updates, in float32 or less. A
matrix product in 16 bits rounds its result: a gradient over 32 examples at once and one
over parts of them differ by one rounding of each part, 2^-8 in bfloat16 and 2^-11 in
float16, and by a few of these where they nearly cancel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth import masks, optimizers, tasks
from benchmarks.truth.law import cut_by
from benchmarks.truth.masks import Mask
from benchmarks.truth.program import Program, Same, pair
from benchmarks.truth.tasks import ROWS, Task, World

_BFLOAT, _HALF = Same(tolerance=2**-5), Same(tolerance=2**-8)
_ROUNDED = Same(tolerance=1e-5)  # float32 alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mixed:
    """Parts of a program in mixed precision.

    Attributes:
      task: Local to a replica; takes no keys.
      tx: Makes the optimizer.
      compute: Dtype of the forward and backward pass.
      params: Dtype of the parameters.
      scale: The dynamic loss scale, if any.
      mask: Which examples or tokens are real; all if None.
    """

    task: Task
    tx: Any
    compute: Any
    params: Any = jnp.float32
    scale: replicator.DynamicLossScale | None = None
    mask: Mask | None = None


def _cast(tree, dtype):
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        tree,
    )


def _total(mixed: _Mixed, params, batch):
    """Return the sum of losses, in float32, and how many there are."""
    mask = batch.get("mask")
    inputs = {name: leaf for name, leaf in batch.items() if name != "mask"}
    half = _cast({"params": params, "batch": inputs}, mixed.compute)
    losses, _ = mixed.task.losses(half["params"], half["batch"], World())
    losses = losses.astype(jnp.float32)
    weight = jnp.ones(losses.shape) if mask is None else mask
    return (losses * weight).sum(), weight.sum()


def _mixed(name: str, mixed: _Mixed, expect: Same) -> Program:
    def make(wrap):
        optimizer = wrap(mixed.tx(), loss_scale=mixed.scale)

        def init(key):
            params = jax.tree.map(
                lambda leaf: jnp.asarray(leaf, mixed.params), mixed.task.params
            )
            return {"params": params, "opt": optimizer.init(params)}

        return init, optimizer

    def ours(optimizer):
        def loss_fn(params, batch, opt):
            total, count = _total(mixed, params, batch)
            told = replicator.Mean(total / jnp.maximum(count, 1e-30), count)
            scaled = replicator.scale_loss(total, opt)
            return replicator.LocalSum(scaled, count), told

        def step(state, batch):
            take = replicator.value_and_grad(loss_fn, has_aux=True)
            (loss, told), grads = take(state["params"], batch, state["opt"])
            updates, opt = optimizer.update(
                grads, state["opt"], state["params"], count=loss.weight
            )
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": told}

        return step

    def oracle(setting, optimizer):
        def loss_fn(params, batch, opt):
            total, count = _total(mixed, params, batch)
            loss = total / count
            return loss * opt["scale"]["value"] if mixed.scale else loss, loss

        @cut_by(())
        def step(state, batch):
            take = jax.grad(loss_fn, has_aux=True)
            grads, loss = take(state["params"], batch, state["opt"])
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": loss}

        return step

    def batch(number):
        rng = np.random.default_rng(400 + number)
        found = mixed.task.batch(rng)
        if mixed.mask is not None:
            found["mask"] = mixed.mask(rng)
        return {name: _narrow(leaf) for name, leaf in found.items()}

    return Program(
        name=name, batch=batch, expect=expect, wide=False, **pair(make, ours, oracle)
    )


def _narrow(leaf):
    return leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf


def _many_tokens(rng):
    """Count 160,000 tokens: more than float16 can."""
    return masks.scattered(rng) * 8000


def _reported(name: str, report, truth, expect: Same) -> Program:
    """Train nothing new; report metrics in small dtypes."""

    def make(wrap):
        optimizer = wrap(optax.sgd(0.1))

        def init(key):
            params = jnp.ones(4)
            return {"params": params, "opt": optimizer.init(params)}

        return init, optimizer

    def loss_fn(params, batch):
        return ((batch["x"] @ params - batch["y"]) ** 2).mean()

    def stepped(optimizer, told):
        def step(state, batch):
            grads = jax.grad(loss_fn)(state["params"], batch)
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, told(batch, params)

        return step

    def batch(number):
        rng = np.random.default_rng(500 + number)
        found = tasks.vectors(rng) | {"mask": _many_tokens(rng)}
        return {name: _narrow(leaf) for name, leaf in found.items()}

    return Program(
        name=name,
        batch=batch,
        expect=expect,
        wide=False,
        **pair(
            make,
            lambda optimizer: stepped(optimizer, report),
            lambda setting, optimizer: cut_by(setting)(
                stepped(optimizer, lambda batch, p: truth(batch, p, setting))
            ),
        ),
    )


def _small(batch, params):
    half = (batch["y"] * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)
    large = batch["label"].astype(jnp.uint8) + jnp.asarray(90, jnp.uint8)
    return {
        "mean": replicator.Mean(half.astype(jnp.float16), batch["mask"].sum()),
        "bytes": replicator.Sum(large.max(initial=0)),
        "right": replicator.Sum((batch["label"] == 1).sum()),
        "any": replicator.Sum((batch["label"] == 1).any()),
        "wide": replicator.Sum((batch["y"] * 100).astype(jnp.float16).sum()),
    }


def _parts(leaf, setting):
    return leaf.reshape(setting.replicas * setting.microbatches, -1)


def _small_truth(batch, params, setting):
    mean = (batch["y"] * batch["mask"]).sum() / batch["mask"].sum()
    labels = _parts(batch["label"], setting)
    return {
        "mean": mean.astype(jnp.float16),
        "bytes": (labels.max(1) + 90).sum().astype(jnp.int32),
        "right": (batch["label"] == 1).sum().astype(jnp.int32),
        "any": (labels == 1).any(1).sum().astype(jnp.int32),
        "wide": (batch["y"] * 100).sum(),
    }


def _kept(batch, params):
    return {
        "smallest": replicator.Min(batch["y"].min()),
        "largest": replicator.Max(batch["label"].max()),
        "rows": replicator.Concat(batch["x"] * 2),
        "labels": replicator.Concat(batch["label"]),
        "each": replicator.PerReplica(batch["y"].mean()),
        "whose": replicator.PerReplica(batch["label"]),
        "norm": jnp.sqrt(params @ params),
    }


def _kept_truth(batch, params, setting):
    n, k = setting
    cut = {
        name: leaf.reshape(k, n, ROWS // (n * k), *leaf.shape[1:]).swapaxes(0, 1)
        for name, leaf in batch.items()
    }
    return {
        "smallest": batch["y"].min(),
        "largest": batch["label"].max(),
        "rows": batch["x"] * 2,
        "labels": batch["label"],
        "each": cut["y"].mean((1, 2)),
        "whose": cut["label"].reshape(n, -1),
        "norm": jnp.sqrt(params @ params),
    }


_SCALE = replicator.DynamicLossScale(initial=2.0**10, growth_interval=2)
_TOO_LARGE = replicator.DynamicLossScale(initial=2.0**40, factor=2.0**30)
PROGRAMS = [
    _mixed(
        "bfloat16-attention-tokens-count",
        _Mixed(
            task=tasks.attention,
            tx=optimizers.momentum,
            compute=jnp.bfloat16,
            mask=masks.lengths,
        ),
        _BFLOAT,
    ),
    _mixed(
        "bfloat16-parameters-padding-count",
        _Mixed(
            task=tasks.smoothed,
            tx=optimizers.scheduled_momentum,
            compute=jnp.bfloat16,
            params=jnp.bfloat16,
            mask=masks.padded,
        ),
        # Parameters are rounded to 2^-8 of themselves, they move by a tenth or so.
        Same(tolerance=2**-3),
    ),
    _mixed(
        "float16-scale-lstm-tokens-count",
        _Mixed(
            task=tasks.lstm,
            tx=optimizers.clipped_adam,
            compute=jnp.float16,
            scale=_SCALE,
            mask=masks.lengths,
        ),
        # Adam divides by the root of what it squares: small entries gain weight.
        Same(tolerance=2**-6),
    ),
    _mixed(
        "float16-scale-overflow-skip-count",
        _Mixed(
            task=tasks.mlp,
            tx=optimizers.momentum,
            compute=jnp.float16,
            scale=_TOO_LARGE,
            mask=masks.scattered,
        ),
        _HALF,
    ),
    _mixed(
        "float16-parameters-scale-count",
        _Mixed(
            task=tasks.mlp,
            tx=optimizers.momentum,
            compute=jnp.float16,
            params=jnp.float16,
            scale=_SCALE,
            mask=masks.empty_replica,
        ),
        # Parameters are rounded to 2^-11 of themselves.
        Same(tolerance=2**-6),
    ),
    _mixed(
        "float32-160000-tokens-count",
        _Mixed(
            task=tasks.mlp,
            tx=optimizers.clipped_adam,
            compute=jnp.float32,
            mask=_many_tokens,
        ),
        Same(tolerance=1e-4),  # Adam, as above
    ),
    _reported("metrics-small-dtypes", _small, _small_truth, _HALF),
    _reported("metrics-rows-extremes-own", _kept, _kept_truth, _ROUNDED),
]
