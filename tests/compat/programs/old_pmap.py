"""A small MLP on data like MNIST, data-parallel with pmap, as such code was written."""

# ruff: noqa

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

CLASSES, FEATURES, BATCH = 10, 64, 64
optimizer = optax.sgd(0.1, momentum=0.9)


def dataset(steps):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(CLASSES, FEATURES))
    for _ in range(steps):
        labels = rng.integers(CLASSES, size=BATCH)
        images = centers[labels] + rng.normal(size=(BATCH, FEATURES))
        yield {"image": images, "label": labels}


def init_params(key):
    k1, k2 = jax.random.split(key)
    return {
        "w1": jax.random.normal(k1, (FEATURES, 32)) / 8.0,
        "b1": jnp.zeros((32,)),
        "w2": jax.random.normal(k2, (32, CLASSES)) / 6.0,
        "b2": jnp.zeros((CLASSES,)),
    }


def loss_fn(params, batch):
    hidden = jax.nn.relu(jnp.dot(batch["image"], params["w1"]) + params["b1"][None])
    logits = jnp.dot(hidden, params["w2"]) + params["b2"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    correct = jnp.argmax(logits, axis=-1) == batch["label"]
    return losses.mean(), correct.mean()


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    grads = jax.lax.pmean(grads, axis_name="batch")
    metrics = jax.lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, metrics


def train(steps=50):
    devices = jax.local_devices()
    params = init_params(jax.random.PRNGKey(0))
    opt_state = jax.device_put_replicated(optimizer.init(params), devices)
    params = jax.device_put_replicated(params, devices)
    history = []
    for batch in dataset(steps):
        batch = jax.tree_map(
            lambda x: x.reshape((len(devices), -1) + x.shape[1:]), batch
        )
        params, opt_state, metrics = train_step(params, opt_state, batch)
        history.append(float(metrics["loss"][0]))
    return jax.tree_map(lambda x: np.asarray(x[0]), params), history


if __name__ == "__main__":
    print("final loss:", train()[1][-1])
