"""Train by a loop of one's own, with all that `run` has around its loop.

    python docs/train_own_loop.py

Kill it, and start it again: it ends with the same bits.
"""

import hashlib
from importlib.resources import files

import jax
import numpy as np
import optax

import replicator

rep = replicator.Replicator()
optimizer = rep.wrap_optimizer(optax.adam(1e-3))

with files("replicator.cli").joinpath("digits.npz").open("rb") as file:
    found = np.load(file)  # 1,797 of 8×8
    pixels = np.float32(found["image"].reshape(-1, 64)) / 16
    digits = {"x": pixels, "y": np.int32(found["label"])}
batches = [{k: v[i : i + 64] for k, v in digits.items()} for i in range(0, 1408, 64)]


def init_fn(key):
    """Make weights and the optimizer's state."""
    params = 0.1 * jax.random.normal(key, (64, 10))
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params, batch):
    """Return the mean loss of a batch."""
    logits = batch["x"] @ params
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


def step_fn(state, batch):
    """Make one update: what one replica does."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss}


with rep.session(
    step_fn,
    batches,
    init_fn=init_fn,
    steps=4000,
    directory="runs/own",
    checkpoint_dir="runs/own/checkpoints",
    checkpoint_every=200,
) as session:
    for batch in session.batches():
        metrics = session.step(batch)
        if session.steps_done % 1000 == 0:
            print(session.steps_done, float(metrics["loss"]))

state = session.result.state
bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
print(session.result.step, hashlib.sha256(bits).hexdigest()[:16])
