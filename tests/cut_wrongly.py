"""A step that is wrong once it is cut: its author's own rule for that is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning

ROWS, WIDTH = 16, 8
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}


def minus_mean(x):
    return x - x.mean(0, keepdims=True)


centred = custom_partitioning(minus_mean)
centred.def_partition(
    # The mean of a device's own rows.
    partition=lambda mesh, args, result: (
        mesh,
        minus_mean,
        args[0].sharding,
        (args[0].sharding,),
    ),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i j -> i j",
)


def init_fn(key):
    return {"w": jnp.ones((WIDTH, WIDTH)), "seen": jnp.zeros((ROWS, WIDTH))}


def step_from(centre):
    """Return a step whose state keeps the batch, centred by `centre`."""

    def step_fn(state, batch):
        def loss_fn(w):
            return jnp.square(batch["x"] @ w).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 0.1 * grads, "seen": centre(batch["x"])}, {
            "loss": loss
        }

    return step_fn
