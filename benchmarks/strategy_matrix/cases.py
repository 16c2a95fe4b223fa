"""The table of cases: a step as for one device, a batch, and what `model` cuts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from benchmarks import tasks
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.strategy_matrix import models
from benchmarks.truth.tasks import weights
from experiments.impala import Impala
from models.impala import ActorCritic
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.testing.invariance import GRADIENT_TOLERANCE

ROWS, WIDTH, WORDS, TIME, LAYERS = 16, 16, 32, 6, 3

Wrap = Callable[..., optax.GradientTransformationExtraArgs]
"""`wrap(name=...)` returns an optimizer of the parameters under that path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model and its training step.

    Attributes:
      name: Of the case.
      parts: `parts(wrap)` returns `init_fn` and `step_fn`, as for one device.
      batch: One global batch, NumPy leaves.
      tensor: What tensor parallelism cuts: partitions of full rank, by pattern.
      tolerance: Of the gradient's norm: law 1, but for what computes in fewer bits.
    """

    name: str
    parts: Callable[[Wrap], tuple[InitFn, StepFn]]
    batch: PyTree
    tensor: Mapping[str, tuple[str | None, ...]]
    tolerance: float = GRADIENT_TOLERANCE


def _trained(loss_fn: Callable, **given: Any) -> dict[str, Any]:
    """Return `parts` of plain training; arrays come in JAX's default float."""
    params = jax.tree.map(_narrow, given)

    def parts(wrap: Wrap) -> tuple[InitFn, StepFn]:
        tx = wrap()

        def init_fn(key: jax.Array) -> PyTree:
            begun = jax.tree.map(jnp.asarray, params)
            return {"params": begun, "opt": tx.init(begun)}

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
            return _updated(tx, state, grads), {"loss": loss}

        return init_fn, step_fn

    return {"parts": parts}


def _updated(tx: Any, state: PyTree, grads: PyTree, **how: Any) -> PyTree:
    updates, opt = tx.update(grads, state["opt"], state["params"], **how)
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def _normed(wrap: Wrap) -> tuple[InitFn, StepFn]:
    """Train behind a batch norm that keeps running statistics."""
    shape = (1, 1, 1, WIDTH)
    params = weights(2, kernel=(3, 3, 8, WIDTH), bias=shape, head=(WIDTH, 8))
    params = jax.tree.map(_narrow, params | {"scale": np.full(shape, 1.3)})
    tx = wrap()

    def init_fn(key: jax.Array) -> PyTree:
        begun = jax.tree.map(jnp.asarray, params)
        running = {"mean": jnp.zeros(shape), "var": jnp.ones(shape)}
        return {"params": begun, "opt": tx.init(begun), "running": running}

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        take = jax.value_and_grad(models.conv_norm, has_aux=True)
        (loss, moments), grads = take(state["params"], batch)
        running = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * new, state["running"], moments
        )
        return {**_updated(tx, state, grads), "running": running}, {"loss": loss}

    return init_fn, step_fn


def _gan(wrap: Wrap) -> tuple[InitFn, StepFn]:
    """Train a generator and its critic, each by an optimizer of its own."""
    made = jax.tree.map(_narrow, weights(8, up=(8, WIDTH), down=(WIDTH, 8)))
    judge = jax.tree.map(_narrow, weights(9, up=(8, WIDTH), down=(WIDTH, 1)))
    generator_tx, critic_tx = wrap(name="generator"), wrap(name="critic")

    def init_fn(key: jax.Array) -> PyTree:
        g, c = (jax.tree.map(jnp.asarray, each) for each in (made, judge))
        return {
            "generator": {"params": g, "opt": generator_tx.init(g)},
            "critic": {"params": c, "opt": critic_tx.init(c)},
        }

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        g, c = state["generator"], state["critic"]
        take = jax.value_and_grad(models.critic_loss)
        c_loss, grads = take(c["params"], g["params"], batch)
        critic = _updated(critic_tx, c, grads)
        take = jax.value_and_grad(models.generator_loss)
        g_loss, grads = take(g["params"], critic["params"], batch)
        generator = _updated(generator_tx, g, grads)
        after = {"generator": generator, "critic": critic}
        return after, {"critic": c_loss, "generator": g_loss}

    return init_fn, step_fn


def _impala(wrap: Wrap) -> tuple[InitFn, StepFn]:
    """Return the learner of `experiments/impala.py`, which wraps its optimizer."""
    net = ActorCritic(num_actions=3, torso="shallow", hidden=WIDTH, lstm=WIDTH)
    agent = Impala(net=net, observation_shape=(20, 20, 2), optimizer=wrap(name=None))
    return agent.init_fn, agent.step_fn


def _trajectories() -> PyTree:
    rng = np.random.default_rng(12)
    seen = (ROWS, TIME + 1)
    last = rng.random(seen) < 0.2
    return {
        "observation": rng.integers(0, 255, (*seen, 20, 20, 2)).astype(np.uint8),
        "first": np.roll(last, 1, axis=1),
        "last": last,
        "core": tuple(np.zeros((ROWS, WIDTH), np.float32) for _ in range(2)),
        "action": rng.integers(0, 3, (ROWS, TIME)).astype(np.int32),
        "reward": _normal(rng, ROWS, TIME),
        "discount": (rng.random((ROWS, TIME)) < 0.9).astype(np.float32),
        "extras": {"logits": _normal(rng, ROWS, TIME, 3)},
    }


def _of_task(task: tasks.Task) -> Callable[[Wrap], tuple[InitFn, StepFn]]:
    """Return the parts of a task, whose model is one of NNX."""

    def parts(wrap: Wrap) -> tuple[InitFn, StepFn]:
        tx = wrap()
        return replicator_init(task, tx), replicator_step(task, tx)

    return parts


_DIGITS, _LM = tasks.digits_resnet(ROWS, width=8), tasks.language_model(ROWS)


def _narrow(leaf: np.ndarray) -> np.ndarray:
    return leaf if leaf.dtype == ml_dtypes.bfloat16 else leaf.astype(np.float32)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _rows(seed: int, **widths: int | tuple[int, ...]) -> PyTree:
    """Draw an array for each name, of so many features a row."""
    rng = np.random.default_rng(seed)
    return {name: _normal(rng, ROWS, *np.atleast_1d(n)) for name, n in widths.items()}


def _words(*shape: int) -> PyTree:
    drawn = np.random.default_rng(3).integers(0, WORDS, (2, ROWS, *shape), np.int32)
    return {"word": drawn[0], "next": drawn[1]}


def _images() -> PyTree:
    label = np.random.default_rng(2).integers(0, 8, ROWS, np.int32)
    return {**_rows(2, image=(4, 4, 8)), "label": label}


def _recurrent(seed: int, inputs: int, width: int, outputs: int) -> PyTree:
    gates = 4 * width
    shapes = {"in": (inputs, gates), "again": (width, gates), "bias": (1, gates)}
    return weights(seed, **shapes, out=(width, outputs))


_VECTORS = _rows(1, x=8, y=8)
_DEEP = weights(5, layers=(LAYERS, 8, 8), first=(8, 8), last=(8, 8))
_MLP = weights(1, up=(8, WIDTH), bias=(1, WIDTH), down=(WIDTH, 8))
_MIXED = {
    **_MLP,
    "scale": np.ones((1, WIDTH), ml_dtypes.bfloat16),
    "down": _MLP["down"].astype(ml_dtypes.bfloat16),
}
_COLUMNS, _LINES = (None, "model"), ("model", None)
_PAIR = {"*/up": _COLUMNS, "*/down": _LINES}
_STACK = {"*/layers": (None, None, "model"), "*/first": _COLUMNS, "*/last": _LINES}

CASES = (
    Case(name="mlp", **_trained(models.mlp, **_MLP), batch=_VECTORS, tensor=_PAIR),
    Case(
        name="conv-norm",
        parts=_normed,
        batch=_images(),
        tensor={"params/kernel": (None, None, None, "model"), "params/head": _LINES},
    ),
    Case(
        name="tied",
        **_trained(
            models.tied,
            **weights(3, table=(WORDS, WIDTH), place=(1, WIDTH), dense=(WIDTH, WIDTH)),
        ),
        batch=_words(),
        tensor={"params/table": _LINES, "params/dense": _COLUMNS},
    ),
    Case(
        name="scan-lm",
        parts=_of_task(_LM),
        batch=_LM.batch,
        tensor={
            "*/embedding": _LINES,
            "*/qkv/kernel": (None, None, None, "model", None),
            "*/out/kernel": (None, "model", None, None),
            "*/up/kernel": (None, None, "model"),
            "*/down/kernel": (None, "model", None),
        },
    ),
    Case(
        name="remat",
        **_trained(models.remat, **_DEEP),
        batch=_VECTORS,
        tensor=_STACK,
    ),
    Case(
        name="lstm",
        **_trained(models.lstm, **_recurrent(6, 8, WIDTH, 8)),
        batch=_rows(6, x=(TIME, 8), y=(TIME, 8)),
        tensor={"params/in": _COLUMNS, "params/again": _COLUMNS, "params/out": _LINES},
    ),
    Case(name="gan", parts=_gan, batch=_rows(8, x=8, noise=8), tensor=_PAIR),
    Case(
        name="while",
        **_trained(models.while_loop, **_MLP),
        batch=_VECTORS,
        tensor=_PAIR,
    ),
    Case(name="cond", **_trained(models.cond, **_DEEP), batch=_VECTORS, tensor=_STACK),
    Case(
        name="custom-vjp",
        **_trained(models.custom_vjp, **_DEEP),
        batch=_VECTORS,
        tensor=_STACK,
    ),
    Case(
        name="scatter",
        **_trained(models.scatter, **_MLP),
        batch=_VECTORS,
        tensor=_PAIR,
    ),
    Case(
        name="scatters",
        **_trained(models.scatters, **_MLP),
        batch=_VECTORS,
        tensor=_PAIR,
    ),
    Case(
        name="mixed",
        **_trained(models.mixed, **_MIXED),
        batch=_VECTORS,
        tensor=_PAIR,
        # A product in bfloat16 rounds to 2^-8, and parts of it one by one.
        tolerance=2**-6,
    ),
    Case(
        name="uneven",
        # What divides is cut, and the rest left whole; or padded, under those that pad.
        **_trained(models.lstm, **_recurrent(7, 5, 6, 3)),
        batch=_rows(7, x=(TIME, 5), y=(TIME, 3)),
        tensor={"params/in": _COLUMNS},
    ),
    Case(
        name="impala",
        parts=_impala,
        batch=_trajectories(),
        tensor={"params/lstm/kernel": _COLUMNS, "params/hidden/kernel": _COLUMNS},
    ),
    Case(
        name="resnet",
        parts=_of_task(_DIGITS),
        batch=_DIGITS.batch,
        tensor={"model/*conv/kernel": (None, None, None, "model")},
    ),
)
"""All cases; the last two are learners of `experiments/`."""
