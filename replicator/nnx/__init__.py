"""Norms and training steps for flax NNX modules; only this folder imports flax.

A module is a pytree and lives in the state like any other. A step differentiates with
respect to its parameters, which are plain nested dicts of arrays, and gets back a moved
copy that holds the new batch statistics; the module in the state is never written to:

    def init_fn(key):
        model = ResNet(depth=18, num_classes=10, rngs=nnx.Rngs(key))
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def loss_fn(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"]).mean()

    def step_fn(state, batch):
        (loss, model), grads = value_and_grad(loss_fn)(state["model"], batch)
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}
"""

from replicator.nnx.batch_norm import BatchNorm, with_standing_statistics
from replicator.nnx.parameters import params_of, value_and_grad, with_params
from replicator.nnx.spectral_norm import SpectralNorm

__all__ = [
    "BatchNorm",
    "SpectralNorm",
    "params_of",
    "value_and_grad",
    "with_params",
    "with_standing_statistics",
]
