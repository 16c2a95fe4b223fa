"""What the processes of a test run: they import this file."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from replicator.compat import jax as old_jax
from replicator.compat import jax_utils
from replicator.compat.jaxline import experiment, train, utils

STEPS = 4


def mapped():
    """Map over the devices of all processes; return what this one is handed back."""
    rank, here = jax.process_index(), jax.local_device_count()
    own = rank * here + np.arange(here, dtype=np.float32)
    total = old_jax.pmap(lambda x: (x, jax.lax.psum(x, "i")), "i")
    rows, sums = total(own)
    again, _ = total(rows)  # what it returned is what it takes
    weights = jax_utils.replicate({"w": np.float32(3)})
    step = old_jax.pmap(
        lambda w, x: jax.tree.map(lambda w: w + jax.lax.pmean(x, "i"), w),
        "i",
        donate_argnums=0,
    )
    for _ in range(20):
        weights = step(weights, own)
    whole = old_jax.pmap(
        lambda x, scale: jax.lax.pmean(x * scale, "i"),
        "i",
        in_axes=(0, None),
        out_axes=None,
    )
    keys = old_jax.pmap(lambda k: jax.random.fold_in(k, jax.lax.axis_index("i")), "i")(
        jax_utils.replicate(jax.random.key(0))
    )
    return {
        "rows": np.asarray(again).tolist(),
        "sums": np.asarray(sums).tolist(),
        "weight": float(jax_utils.unreplicate(weights)["w"]),
        "whole": float(whole(own, np.float32(2))),
        "keys": np.asarray(jax.random.key_data(keys)).tolist(),
    }


class Mean(experiment.AbstractExperiment):
    """Follows the mean over all devices."""

    CHECKPOINT_ATTRS = {"_w": "w", "_opt": "opt"}  # noqa: RUF012

    def __init__(self, mode, init_rng):
        super().__init__(mode, init_rng)
        self._optimizer = optax.sgd(0.1, momentum=0.9)
        self._w = self._opt = None
        self._update = old_jax.pmap(self._update_fn, "i")

    def step(self, *, rng, **unused):
        if self._w is None:
            w = jnp.zeros(2)
            self._w, self._opt = utils.bcast_local_devices((w, self._optimizer.init(w)))
        self._w, self._opt = self._update(self._w, self._opt, rng)
        return {"norm": jnp.linalg.norm(utils.get_first(self._w))}

    def evaluate(self, **unused):
        return {}

    def _update_fn(self, w, opt, rng):
        grads = jax.lax.pmean(w - jax.random.normal(rng, (2,)), "i")
        updates, opt = self._optimizer.update(grads, opt)
        return optax.apply_updates(w, updates), opt


class Config:
    """A jaxline config."""

    interval_type = "steps"
    save_checkpoint_interval = 2
    log_train_data_interval = 1

    def __init__(self, directory, training_steps):
        self.checkpoint_dir = directory
        self.training_steps = training_steps


def experiment_in_two_parts(*, directory):
    """Train for half of the steps, then go on; return the weights."""
    for steps in (STEPS // 2, STEPS):
        done = train(Mean, Config(directory, steps), display=False)
    return np.asarray(utils.get_first(done.state._w)).tolist()


def experiment_in_one():
    """Train for all steps; nothing is saved."""
    done = train(Mean, Config(None, STEPS), display=False)
    return np.asarray(utils.get_first(done.state._w)).tolist()
