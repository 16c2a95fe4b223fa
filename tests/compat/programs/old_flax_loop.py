"""A flax training loop with `jax_utils`, as flax's examples had it until 2024."""

# ruff: noqa

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state

CLASSES, FEATURES, BATCH = 10, 64, 64


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(32, param_dtype=float)(x))
        x = nn.Dropout(0.0, deterministic=not train)(x)
        return nn.Dense(CLASSES, param_dtype=float)(x)


def batches(steps):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(CLASSES, FEATURES))
    for _ in range(steps):
        labels = rng.integers(CLASSES, size=BATCH)
        images = centers[labels] + rng.normal(size=(BATCH, FEATURES))
        yield {"image": images, "label": labels}


def create_train_state(rng):
    model = Classifier()
    params = model.init(rng, jnp.ones((1, FEATURES)), train=False)["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
    )


def cross_entropy(logits, labels):
    targets = common_utils.onehot(labels, CLASSES)
    return optax.softmax_cross_entropy(logits, targets.astype(logits.dtype)).mean()


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
def p_train_step(state, batch, dropout_rng):
    dropout_rng, next_rng = jax.random.split(dropout_rng)

    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params},
            batch["image"],
            train=True,
            rngs={"dropout": dropout_rng},
        )
        return cross_entropy(logits, batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    state = state.apply_gradients(grads=grads)
    return state, jax.lax.pmean({"loss": loss}, "batch"), next_rng


@jax.pmap
def p_predict(params, images):
    return jnp.argmax(Classifier().apply({"params": params}, images, train=False), -1)


def train(steps=50):
    state = jax_utils.replicate(create_train_state(jax.random.PRNGKey(0)))
    dropout_rng = common_utils.shard_prng_key(jax.random.PRNGKey(1))
    source = jax_utils.prefetch_to_device(map(common_utils.shard, batches(steps)), 2)
    train_metrics = []
    for batch in source:
        state, metrics, dropout_rng = p_train_step(state, batch, dropout_rng)
        train_metrics.append(metrics)
    history = common_utils.get_metrics(train_metrics)["loss"]
    (last,) = batches(1)
    predict = jax_utils.pad_shard_unpad(p_predict)
    labels = predict(state.params, last["image"][:61])
    accuracy = float(np.mean(labels == last["label"][:61]))
    return jax_utils.unreplicate(state).params, list(map(float, history)), accuracy


if __name__ == "__main__":
    print("final loss:", train()[1][-1])
