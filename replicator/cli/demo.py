"""`replicator demo`: train on real handwritten digits, here and now.

Everything is in the package, the digits included: 1,797 images of 8×8, of which every
fifth is for testing. Source: E. Alpaydin and C. Kaynak, Optical Recognition of
Handwritten Digits, UCI Machine Learning Repository, 1998 (its test set); CC BY 4.0.
Where there is no accelerator eight fake CPU devices stand in for them.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from replicator.base.host.fake_devices import ENVIRONMENT_VARIABLE, size_cpu_pool
from replicator.base.host.paths import expanded
from replicator.cli.tables import print_table
from replicator.errors import check_count
from replicator.replicator import Replicator

SUMMARY = "Train on real handwritten digits, on fake devices if there are no others"
_FAKE_DEVICES = 8
_DIGITS = Path(__file__).with_name("digits.npz")  # uint8 [1797, 8, 8], [1797]
_TEST_EVERY = 5
_LEVELS = 16  # of grey
_CHANNELS = (1, 16, 32)
_CLASSES = 10
_PEAK_RATE = 5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--steps", type=int, default=400, help="updates (default: %(default)s)"
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        default=128,
        metavar="N",
        help="examples per update, over all replicas (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--directory",
        type=expanded,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where the run's records go (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Train, test and print the results."""
    steps, directory = arguments.steps, arguments.directory
    check_count("steps", steps)
    check_count("global_batch", arguments.global_batch)
    stand_in_for_accelerators()
    started_s = time.monotonic()
    rep = Replicator()
    train_set, test_set = split_digits()
    init_fn, step_fn = make_training(rep, steps)
    result = rep.run(
        step_fn,
        shuffled_batches(train_set, arguments.global_batch, arguments.seed),
        init_fn=init_fn,
        steps=steps,
        seed=arguments.seed,
        directory=directory,
    )
    tested = rep.evaluate(_test, [test_set], state=result.state)
    seconds = time.monotonic() - started_s
    assert result.progress is not None  # there was a step
    accuracy, examples = tested["accuracy"], int(tested["examples"])
    rows = [
        ("test accuracy", f"{accuracy:.1%} of {examples} digits"),
        ("throughput", f"{result.progress.examples_per_s or 0.0:,.0f} examples/s"),
        ("replicas", f"{rep.num_replicas} ({jax.devices()[0].platform})"),
        ("took", f"{seconds:.0f} s, compilation and test included"),
        ("metrics", str(directory / "metrics.jsonl")),
        ("to see it", f"replicator report {directory}"),
    ]
    print_table(("demo", f"{steps} steps"), rows)
    return 0


def stand_in_for_accelerators() -> None:
    """Have JAX make fake CPU devices; it uses them only where it finds no others."""
    chosen = jax.config.jax_num_cpu_devices != -1  # pyright: ignore
    if chosen or os.environ.get(ENVIRONMENT_VARIABLE) or os.environ.get("XLA_FLAGS"):
        return
    size_cpu_pool(_FAKE_DEVICES)
    jax.config.update("jax_num_cpu_devices", _FAKE_DEVICES)


def make_training(
    rep: Replicator, steps: int
) -> tuple[Callable[[jax.Array], dict], Callable[[dict, dict], tuple[dict, dict]]]:
    """Return `init_fn`, which makes the state, and `step_fn`, one replica's step.

    Args:
      rep: Wraps the optimizer.
      steps: Number of updates, over which the learning rate rises and falls.
    """
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

    return init_fn, step_fn


def split_digits() -> tuple[dict, dict]:
    """Return the digits to train on and those to test on.

    Returns:
      Two of {"image": float32 [n, 8, 8, 1] in 0..1, "label": int32 [n]}.

    >>> train, test = split_digits()
    >>> train["image"].shape, test["label"].shape
    ((1437, 8, 8, 1), (360,))
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
    """Yield full batches without end, each epoch in another order.

    >>> batches = shuffled_batches(split_digits()[0], 32, seed=0)
    >>> next(batches)["label"].shape
    (32,)
    """
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
