"""Tasks to train, so that several ways of training them can be compared."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.resnet import ResNet
from models.transformer import Transformer, next_token_nats
from replicator import nnx as replicator_nnx
from replicator.base.types import Key, PyTree

NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model, how its loss is differentiated, and a global batch of random examples.

    Attributes:
      init_model: Returns the model for a key: a pytree.
      value_and_grad: `value_and_grad(model, batch) -> ((loss, model), gradients)`, with
        the model as the loss left it.
      params_of: Takes out of a model what an optimizer updates.
      with_params: Puts it back.
      batch: NumPy leaves [global_batch, ...].
    """

    init_model: Callable[[Key], PyTree]
    value_and_grad: Callable[[PyTree, PyTree], tuple[tuple[jax.Array, PyTree], PyTree]]
    params_of: Callable[[PyTree], PyTree]
    with_params: Callable[[PyTree, PyTree], PyTree]
    batch: PyTree


def of_plain_params(loss_fn: Callable[[PyTree, PyTree], jax.Array]) -> Callable:
    """Return `Task.value_and_grad` of a loss whose model is its parameters."""

    def value_and_grad(params: PyTree, batch: PyTree):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return (loss, params), grads

    return value_and_grad


def mlp(global_batch: int, *, sizes: Sequence[int] = (784, 128, 128, 10)) -> Task:
    """Return a plain MLP in plain dicts: no module machinery on the host."""

    def init_model(key: Key) -> PyTree:
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            {
                "kernel": jax.random.normal(each, (inputs, outputs)) * inputs**-0.5,
                "bias": jnp.zeros(outputs),
            }
            for each, inputs, outputs in zip(keys, sizes, sizes[1:], strict=False)
        ]

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["image"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return _cross_entropy(x @ params[-1]["kernel"] + params[-1]["bias"], batch)

    return Task(
        init_model=init_model,
        value_and_grad=of_plain_params(loss_fn),
        params_of=lambda params: params,
        with_params=lambda _, params: params,
        batch=_examples(global_batch, sizes[0]),
    )


def digits_resnet(global_batch: int, *, width: int = 8) -> Task:
    """Return the network of `experiments/digits_resnet.py`, its norms cross-replica."""

    def init_model(key: Key) -> PyTree:
        return ResNet(
            depth=18,
            num_classes=NUM_CLASSES,
            width=width,
            in_channels=1,
            stem="small",
            rngs=nnx.Rngs(key),
        )

    def loss_fn(model: ResNet, batch: PyTree) -> jax.Array:
        return _cross_entropy(model(batch["image"]), batch)

    return Task(
        init_model=init_model,
        value_and_grad=replicator_nnx.value_and_grad(loss_fn),
        params_of=replicator_nnx.params_of,
        with_params=replicator_nnx.with_params,
        batch=_examples(global_batch, 8, 8, 1),
    )


def language_model(
    global_batch: int,
    *,
    vocabulary: int = 32,
    layers: int = 2,
    width: int = 16,
    heads: int = 4,
    context: int = 8,
    **options: Any,
) -> Task:
    """Return a decoder of `models/transformer.py`, its layers in a loop.

    Args:
      global_batch: Sequences.
      vocabulary: Number of different tokens.
      layers: Of the decoder.
      width: Features of a token.
      heads: Of attention.
      context: Tokens of a sequence that are learned from.
      **options: Of the network: `remat`, `tied` and so on.
    """

    def init_model(key: Key) -> PyTree:
        return Transformer(
            vocabulary=vocabulary,
            layers=layers,
            width=width,
            heads=heads,
            context=context,
            rngs=nnx.Rngs(key),
            **options,
        )

    def loss_fn(model: Transformer, batch: PyTree) -> jax.Array:
        return next_token_nats(model, batch["tokens"]).mean()

    shape = (global_batch, context + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape, np.int32)
    return Task(
        init_model=init_model,
        value_and_grad=replicator_nnx.value_and_grad(loss_fn),
        params_of=replicator_nnx.params_of,
        with_params=replicator_nnx.with_params,
        batch={"tokens": tokens},
    )


def _cross_entropy(logits: jax.Array, batch: PyTree) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


def _examples(count: int, *shape: int) -> PyTree:
    rng = np.random.default_rng(0)
    return {
        "image": rng.standard_normal((count, *shape), np.float32),
        "label": rng.integers(0, NUM_CLASSES, count, np.int32),
    }
