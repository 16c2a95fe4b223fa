"""A small convolutional network in plain JAX, trained on the UCI handwritten digits.

1,797 real 8×8 images, in `digits.npz`: every fifth is for testing. Source: E. Alpaydin
and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998 (its test set); CC BY 4.0.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from replicator.replicator import Replicator

_DIGITS = Path(__file__).with_name("digits.npz")  # uint8 [1797, 8, 8], [1797]
_TEST_EVERY = 5
_LEVELS = 16  # of grey
_CHANNELS = (1, 16, 32)
_CLASSES = 10
_PEAK_RATE = 5e-3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the training went.

    Attributes:
      accuracy: Share of test digits read right.
      examples: How many there were.
      examples_per_s: Training throughput at the end.
      replicas: On how many devices.
    """

    accuracy: float
    examples: int
    examples_per_s: float
    replicas: int


def train(*, steps: int, global_batch: int, seed: int, directory: Path) -> Outcome:
    """Train, and test on digits that were not seen.

    Args:
      steps: Updates.
      global_batch: Examples per update.
      seed: Of weights and of the order of examples.
      directory: Where the run's records go.
    """
    rep = Replicator()
    rate = optax.cosine_onecycle_schedule(max(steps, 10), _PEAK_RATE)
    optimizer = rep.wrap_optimizer(optax.adamw(rate))

    def init_fn(key: jax.Array) -> dict:
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state: dict, batch: dict) -> tuple[dict, dict]:
        (loss, accuracy), grads = jax.value_and_grad(_loss, has_aux=True)(
            state["params"], batch
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss, "accuracy": accuracy}

    train_set, test_set = split_digits()
    result = rep.run(
        step_fn,
        shuffled_batches(train_set, global_batch, seed),
        init_fn=init_fn,
        steps=steps,
        seed=seed,
        directory=directory,
    )
    tested = rep.evaluate(_test, [test_set], state=result.state)
    assert result.progress is not None  # there was a step
    return Outcome(
        accuracy=tested["accuracy"],
        examples=int(tested["examples"]),
        examples_per_s=result.progress.examples_per_s or 0.0,
        replicas=rep.num_replicas,
    )


def split_digits() -> tuple[dict, dict]:
    """Return the digits to train on and those to test on.

    Returns:
      Two of {"image": float32 [n, 8, 8, 1] in 0..1, "label": int32 [n]}.
    """
    with np.load(_DIGITS, allow_pickle=False) as stored:
        digits = {
            "image": np.float32(stored["image"][..., None] / _LEVELS),
            "label": stored["label"].astype(np.int32),
        }
    is_test = np.arange(len(digits["label"])) % _TEST_EVERY == 0
    return (
        {name: array[~is_test] for name, array in digits.items()},
        {name: array[is_test] for name, array in digits.items()},
    )


def shuffled_batches(digits: dict, size: int, seed: int) -> Iterator[dict]:
    """Yield full batches for ever; each epoch has another order."""
    order = np.random.default_rng(seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, order.permutation(len(digits["label"]))])
        chosen, waiting = waiting[:size], waiting[size:]
        yield {name: array[chosen] for name, array in digits.items()}


def init_params(key: jax.Array) -> dict:
    """Make the weights: two 3×3 convolutions of stride 1 and 2, then a dense layer."""
    first, second, last = jax.random.split(key, 3)
    he = jax.nn.initializers.he_normal(in_axis=(0, 1, 2))
    one, two, three = _CHANNELS
    inputs = 4 * 4 * three
    return {
        "conv_1": {"w": he(first, (3, 3, one, two)), "b": jnp.zeros(two)},
        "conv_2": {"w": he(second, (3, 3, two, three)), "b": jnp.zeros(three)},
        "dense": {
            "w": jax.nn.initializers.glorot_normal()(last, (inputs, _CLASSES)),
            "b": jnp.zeros(_CLASSES),
        },
    }


def logits(params: dict, images: jax.Array) -> jax.Array:
    """Return [batch, 10] scores for images [batch, 8, 8, 1]."""
    hidden = jax.nn.relu(_convolve(params["conv_1"], images, stride=1))
    hidden = jax.nn.relu(_convolve(params["conv_2"], hidden, stride=2))
    flat = hidden.reshape(hidden.shape[0], -1)
    dense = params["dense"]
    return flat @ dense["w"] + dense["b"][None]


def _convolve(layer: dict, images: jax.Array, *, stride: int) -> jax.Array:
    maps = jax.lax.conv_general_dilated(
        images,
        layer["w"],
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return maps + layer["b"][None, None, None]


def _loss(params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    scores, labels = logits(params, batch["image"]), batch["label"]
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
    return loss, (scores.argmax(-1) == labels).mean()


def _test(state: dict, batch: dict) -> dict:
    scores = logits(state["params"], batch["image"])
    return {"accuracy": (scores.argmax(-1) == batch["label"]).astype(jnp.float32)}
