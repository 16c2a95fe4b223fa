"""A jaxline experiment: state in attributes, made at the first step."""

# ruff: noqa

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app
from jaxline import base_config, experiment, platform, utils
from ml_collections import config_dict


def get_config():
    config = base_config.get_base_config()
    config.experiment_kwargs = config_dict.ConfigDict(
        {"config": {"classes": 10, "features": 64, "batch": 64, "learning_rate": 0.05}}
    )
    config.training_steps = 40
    config.interval_type = "steps"
    config.save_checkpoint_interval = 10
    config.log_train_data_interval = 5
    config.random_seed = 7
    config.checkpoint_dir = "/tmp/experiment"
    return config


class Experiment(experiment.AbstractExperiment):
    CHECKPOINT_ATTRS = {"_params": "params", "_opt_state": "opt_state"}
    NON_BROADCAST_CHECKPOINT_ATTRS = {"_batches_read": "batches_read"}

    def __init__(self, mode, init_rng, config):
        super().__init__(mode=mode, init_rng=init_rng)
        self.mode = mode
        self.init_rng = init_rng
        self.config = config
        self._params = None
        self._opt_state = None
        self._batches_read = 0
        self._train_input = None
        self._optimizer = optax.adam(config.learning_rate)
        self._update = jax.pmap(self._update_fn, axis_name="i", donate_argnums=(0, 1))

    def step(self, *, global_step, rng, **unused_args):
        if self._train_input is None:
            self._initialize_train()
        batch = next(self._train_input)
        self._batches_read += 1
        self._params, self._opt_state, scalars = self._update(
            self._params, self._opt_state, rng, batch
        )
        return utils.get_first(scalars)

    def evaluate(self, *, global_step, **unused_args):
        batch = self._batch(10_000)
        loss, _ = self._loss_fn(utils.get_first(self._params), batch)
        return {"eval_loss": jax.device_get(loss)}

    def _initialize_train(self):
        first = self._batches_read
        self._train_input = utils.py_prefetch(lambda: self._build_train_input(first))
        if self._params is None:
            params = self._init_fn(self.init_rng)
            self._opt_state = utils.bcast_local_devices(self._optimizer.init(params))
            self._params = utils.bcast_local_devices(params)

    def _build_train_input(self, first):
        index = first
        while True:
            yield jax.tree_map(
                lambda x: x.reshape((jax.local_device_count(), -1) + x.shape[1:]),
                self._batch(index),
            )
            index += 1

    def _batch(self, index):
        c = self.config
        centers = np.random.default_rng(0).normal(size=(c.classes, c.features))
        rng = np.random.default_rng(index + 1)
        labels = rng.integers(c.classes, size=c.batch)
        images = centers[labels] + rng.normal(size=(c.batch, c.features))
        return {"image": images, "label": labels}

    def _init_fn(self, rng):
        shape = (self.config.features, self.config.classes)
        return {"linear": {"w": 0.1 * jax.random.normal(rng, shape)}}

    def _loss_fn(self, params, batch):
        logits = jnp.dot(batch["image"], params["linear"]["w"])
        labels = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (jnp.argmax(logits, -1) == labels).mean()

    def _update_fn(self, params, opt_state, rng, batch):
        del rng
        grad_fn = jax.value_and_grad(self._loss_fn, has_aux=True)
        (loss, accuracy), grads = grad_fn(params, batch)
        grads = jax.lax.pmean(grads, axis_name="i")
        scalars = jax.lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="i")
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, scalars


if __name__ == "__main__":
    app.run(functools.partial(platform.main, Experiment), argv=sys.argv)
