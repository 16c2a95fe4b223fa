"""A small regression on eight fake devices: what the programs of a newcomer begin with.

Each program of `first_hour` runs in a process of its own and takes its names from here.
"""

import itertools
import os
import tempfile

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import replicator
from replicator import options, strategies, testing
from replicator.nnx import params_of, value_and_grad, with_params

__all__ = [
    "InputOptions",
    "Net",
    "batch",
    "dataset",
    "eval_fn",
    "grain",
    "init_fn",
    "init_net",
    "init_params",
    "itertools",
    "jax",
    "jnp",
    "lax",
    "loss_fn",
    "net_loss",
    "nnx",
    "np",
    "optax",
    "optimizer",
    "options",
    "os",
    "params_of",
    "rep",
    "replicator",
    "step_fn",
    "strategies",
    "tempfile",
    "testing",
    "update",
    "value_and_grad",
    "with_params",
]

InputOptions = replicator.InputOptions
if "REPLICATOR_FAKE_DEVICES" not in os.environ:
    replicator.fake_devices(8)
rep = replicator.Replicator()
optimizer = rep.wrap_optimizer(optax.sgd(0.1))
_rng = np.random.default_rng(0)
batch = {
    "x": _rng.standard_normal((32, 3)).astype(np.float32),
    "y": _rng.standard_normal(32).astype(np.float32),
}
dataset = [batch] * 3


def init_params(key):
    return {"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}


def init_fn(key):
    params = init_params(key)
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params, batch):
    predicted = batch["x"] @ params["w"] + params["b"]
    return ((predicted - batch["y"]) ** 2).mean()


def update(state, grads, loss=0.0):
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss}


def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    return update(state, grads, loss)


def eval_fn(params, batch):
    predicted = batch["x"] @ params["w"] + params["b"]
    return {"loss": (predicted - batch["y"]) ** 2}


class Net(nnx.Module):
    """A perceptron of flax NNX, with dropout if it is asked for."""

    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):  # noqa: D102
        return self.last(self.drop(nnx.relu(self.first(x))))[:, 0]


def net_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def init_net(key):
    model = Net(nnx.Rngs(key))
    return {"model": model, "opt": optimizer.init(params_of(model))}
