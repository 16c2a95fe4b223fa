"""Steps to choose for, of which nothing is made but shapes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import replicator
from replicator.base.types import PyTree
from replicator.strategies.rule import Partition
from replicator.tuning.choosing.subject import Subject

LAYERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Sizes of a step.

    Attributes:
      width: Features of a perceptron's layer, which has four times as many inside; or
        of a row of an embedding.
      examples: Number of examples of a global batch.
      rows: Number of rows of an embedding; 0 for a perceptron.
    """

    width: int
    examples: int
    rows: int = 0

    @property
    def tensor_rules(self) -> Mapping[str, Partition] | None:
        """Rules for `tensor_parallel`."""
        if self.rows:
            return None
        return {"params/*/up": (None, "model"), "params/*/down": ("model",)}

    def subject(self) -> Subject:
        """Return the step, whose optimizer obeys a strategy's rules."""
        rep = replicator.Replicator(strategy="auto")
        step_fn, init_fn, batch = (
            _embedding(self, rep) if self.rows else _perceptron(self, rep)
        )
        return Subject(
            step_fn=step_fn, init_fn=init_fn, batch=batch, decision=rep.decision
        )


def _perceptron(model: Model, rep: replicator.Replicator) -> tuple:
    inner, outer = 4 * model.width, model.width

    def init_params(key: jax.Array) -> PyTree:
        del key
        layer = {"up": jnp.zeros((outer, inner)), "down": jnp.zeros((inner, outer))}
        return {f"layer{n}": layer for n in range(LAYERS)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["x"]
        for layer in params.values():
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    shape = (model.examples, model.width)
    batch = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return *_training(rep, init_params, loss_fn), batch


def _embedding(model: Model, rep: replicator.Replicator) -> tuple:
    def init_params(key: jax.Array) -> PyTree:
        del key
        return {"table": jnp.zeros((model.rows, model.width))}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return jnp.mean(params["table"][batch["words"]] ** 2)

    batch = {"words": jax.ShapeDtypeStruct((model.examples,), jnp.int32)}
    return *_training(rep, init_params, loss_fn), batch


def _training(
    rep: replicator.Replicator,
    init_params: Callable[[jax.Array], PyTree],
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    optimizer = rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9))

    def init_fn(key: jax.Array) -> PyTree:
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return step_fn, init_fn
