"""A step that goes bad on a batch with a negative number, for tests to replay."""

import jax.numpy as jnp
import optax

from replicator.engine.step.optimizer import wrap_optimizer
from tests.steps import mlp, trainer


def root_loss(params, batch):
    wide = mlp(params, batch["x"]) - batch["y"]
    return (wide**2).mean() + jnp.sqrt(batch["x"].min() + 1).astype(jnp.float32)


init_fn, step_fn = trainer(wrap_optimizer(optax.sgd(0.1)), root_loss)
