"""Steps that are right and look wrong: rounding turns over what they tell."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.strategy_matrix import models
from benchmarks.strategy_matrix.cases import CASES, Case, Wrap
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.engine.step.loss_scale import DynamicLossScale
from replicator.engine.step.optimizer import wrap_optimizer
from replicator.engine.step.optimizer_state import scale_loss

OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, 0.9),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-1),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "signs": lambda: optax.sign_sgd(1e-3),
}
"""By name; as users set them, with an epsilon below rounding."""


def _logits(params: PyTree, images: Array, *, norm: bool) -> tuple[Array, ...]:
    """Return logits, features and moments of a convolution, in the dtype of images."""
    half = jax.tree.map(lambda leaf: leaf.astype(images.dtype), params)
    names = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        images, half["kernel"], (1, 1), "SAME", dimension_numbers=names
    )
    y = y + half["bias"]  # before a norm its gradient is nothing but rounding
    mean = y.mean((0, 1, 2), keepdims=True)
    var = jnp.square(y - mean).mean((0, 1, 2), keepdims=True)
    if norm:
        y = (y - mean) * jax.lax.rsqrt(var + 1e-3) * half["scale"]
    hidden = jax.nn.relu(y).mean((1, 2))
    found = (hidden @ half["head"], hidden, mean, var)
    return tuple(each.astype(jnp.float32) for each in found)


def _told(loss: Array, logits: Array, label: Array) -> dict[str, Array]:
    whitened = (logits - logits.mean()) / logits.std()
    return {
        "loss": loss,
        "accuracy": (jnp.argmax(logits, -1) == label).mean(),
        "rounded": jnp.round(1e3 * loss),
        "surest": jnp.where(logits > 0, 1.0, 0.0).mean(),
        "whitened": whitened.mean(),
    }


def _first_params(key: Array) -> PyTree:
    keys = jax.random.split(key)
    return {
        "kernel": jax.random.normal(keys[0], (3, 3, 8, 16)) / 8,
        "bias": jnp.zeros((1, 1, 1, 16)),
        "scale": jnp.ones((1, 1, 1, 16)),
        "head": jax.random.normal(keys[1], (16, 8)) / 4,
    }


def _classifier(dtype: Any, *, norm: bool = False) -> Case:
    """Train images in `dtype`; tell an accuracy, keep a queue of sorted indices."""

    def parts(wrap: Wrap) -> tuple[InitFn, StepFn]:
        tx = wrap()

        def init_fn(key: Array) -> PyTree:
            params, shape = _first_params(key), (1, 1, 1, 16)
            return {
                "params": params,
                "opt": tx.init(params),
                "queue": jnp.zeros((64, 16), jnp.int32),
                "running": {"mean": jnp.zeros(shape), "var": jnp.ones(shape)},
            }

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            def loss_fn(params: PyTree) -> tuple[Array, tuple]:
                seen = _logits(params, batch["image"].astype(dtype), norm=norm)
                loss = optax.softmax_cross_entropy_with_integer_labels(
                    seen[0], batch["label"]
                ).mean()
                is_scaled = dtype == jnp.float16
                return scale_loss(loss, state["opt"]) if is_scaled else loss, (
                    loss,
                    seen,
                )

            grads, (loss, seen) = jax.grad(loss_fn, has_aux=True)(state["params"])
            updates, opt = tx.update(grads, state["opt"], state["params"])
            order = jnp.argsort(seen[1], 0)[:8].astype(jnp.int32)
            moments = {"mean": seen[2], "var": seen[3]}
            after = {
                "params": optax.apply_updates(state["params"], updates),
                "opt": opt,
                "queue": jnp.concatenate([order, state["queue"][:-8]]),
                "running": jax.tree.map(
                    lambda old, new: 0.9 * old + 0.1 * new, state["running"], moments
                ),
            }
            return after, _told(loss, seen[0], batch["label"])

        return init_fn, step_fn

    batch = next(case.batch for case in CASES if case.name == "conv-norm")
    return Case(name="", parts=parts, batch=batch, tensor={})


def _mlp_in(dtype: Any) -> Case:
    """Train the small model of the matrix with all of it, state too, in `dtype`."""
    mlp = next(case for case in CASES if case.name == "mlp")

    def parts(wrap: Wrap) -> tuple[InitFn, StepFn]:
        init_fn, _ = mlp.parts(wrap)
        tx = wrap()

        def narrow(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)

        def init(key: Array) -> PyTree:
            params = narrow(init_fn(key)["params"])
            return {"params": params, "opt": tx.init(params)}

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            take = jax.value_and_grad(models.mlp)
            loss, grads = take(state["params"], narrow(batch))
            updates, opt = tx.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt}, {"loss": loss}

        return init, step_fn

    return dataclasses.replace(mlp, parts=parts)


SOUND: Mapping[str, Case] = {
    **{case.name: case for case in CASES},
    "classifier": _classifier(jnp.float32),
    "norm": _classifier(jnp.float32, norm=True),
    "bfloat16": _classifier(jnp.bfloat16, norm=True),
    "float16": _classifier(jnp.float16, norm=True),
    "all-bfloat16": _mlp_in(jnp.bfloat16),
    "all-float16": _mlp_in(jnp.float16),
}
"""By name."""


def wrapped(name: str, case: str) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer, wrapped as accumulation and a loss scale need it."""
    scale = DynamicLossScale() if case == "float16" else None
    return wrap_optimizer(OPTIMIZERS[name](), loss_scale=scale)
