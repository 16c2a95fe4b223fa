"""Train a small network on real digits, as one process of several, or alone.

    replicator launch --processes 2 --devices-per-process 2 docs/train.py

Kill it, and start it again: it ends with the same bits.
"""

import hashlib
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator

replicator.distributed.initialize()  # finds the other processes, if there are any
rep = replicator.Replicator()
optimizer = rep.wrap_optimizer(optax.adam(1e-3))

with files("replicator.cli").joinpath("digits.npz").open("rb") as file:
    found = np.load(file)  # 1,797 of 8×8
    pixels = np.float32(found["image"].reshape(-1, 64)) / 16
    digits = {"x": pixels, "y": np.int32(found["label"])}
batches = [{k: v[i : i + 64] for k, v in digits.items()} for i in range(0, 1408, 64)]
unseen = [{k: v[1408:] for k, v in digits.items()}]


def init_fn(key):
    """Make weights and the optimizer's state."""
    hidden = 0.1 * jax.random.normal(key, (64, 256))
    params = {"hidden": hidden, "out": jnp.zeros((256, 10))}
    return {"params": params, "opt": optimizer.init(params)}


def scores(params, images):
    """Return [batch, 10] scores for images [batch, 64]."""
    return jax.nn.relu(images @ params["hidden"]) @ params["out"]


def loss_fn(params, batch):
    """Return the mean loss of a batch."""
    logits = scores(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


def step_fn(state, batch):
    """Make one update: what one replica does."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss}


def eval_fn(state, batch):
    """Tell of each example whether it is read right."""
    right = scores(state["params"], batch["x"]).argmax(-1) == batch["y"]
    return {"accuracy": jnp.float32(right)}


result = rep.run(
    step_fn,
    batches,
    init_fn=init_fn,
    steps=4000,
    directory="runs/digits",
    checkpoint_dir="runs/digits/checkpoints",
    checkpoint_every=200,
    eval_fn=eval_fn,
    eval_dataset=unseen,
    eval_every=500,
)
bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.state))
print(result.evaluation, hashlib.sha256(bits).hexdigest()[:16])
