"""Run a step that was written for one device, as it is, under every strategy that cuts.

    python -m experiments.unmodified

The claim: there is nothing to change in a training step of jax and optax, its optimizer
not wrapped, its norm of gradients clipped over all of them. Handwritten digits are
learned under each strategy that partitions and by `jax.jit` on one device; the last
line is one JSON object: `worst_difference` between parameters, relative to their norm.
With `accumulate` above 1 an optimizer must be wrapped, as it would update at each
microbatch: `asked_to_wrap` counts the strategies that ask for it.
"""

import dataclasses
import json
import os
import typing

import jax
import numpy as np
import optax

import replicator
from experiments import config_flags, digits
from experiments.config_flags import Count, Settings
from experiments.strategy_flag import StrategyName, named_strategy
from replicator.errors import ArgumentError

PARTITIONING = [
    name for name in typing.get_args(StrategyName) if name != "data_parallel"
]
TENSOR_PARALLEL = {"params/hidden/*": (None, "model"), "params/last/*": ("model",)}
_HIDDEN = 256
_PIXELS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      steps: Updates under each strategy.
      global_batch: Digits per update.
      fake_devices: How many stand in for others; REPLICATOR_FAKE_DEVICES goes first.
    """

    steps: Count = 100
    global_batch: Count = 64
    fake_devices: Count = 8


# As in any script for one device ------------------------------------------------------

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def init(key: jax.Array) -> dict:
    """Make parameters and the optimizer's state."""
    hidden, last = jax.random.split(key)
    dense = jax.nn.initializers.he_normal()
    params = {
        "hidden": {"w": dense(hidden, (_PIXELS, _HIDDEN))},
        "last": {"w": dense(last, (_HIDDEN, digits.NUM_CLASSES))},
    }
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params: dict, batch: dict) -> jax.Array:
    """Return the mean loss of a batch."""
    features = jax.nn.relu(batch["image"] @ params["hidden"]["w"])
    logits = features @ params["last"]["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


def train_step(state: dict, batch: dict) -> tuple[dict, dict]:
    """Make one update."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss}


# -------------------------------------------------------------------------------------


def batches(config: Config) -> list[dict[str, np.ndarray]]:
    """Return as many batches as there are steps, each of different digits.

    Raises:
      ArgumentError: There are not so many digits.
    """
    images, labels = digits.digits_arrays("train")
    if config.global_batch > len(labels):
        raise ArgumentError(
            f"`--global_batch` must be at most {len(labels)}, all digits, got "
            f"{config.global_batch}. Use {len(labels)}."
        )
    order = np.random.default_rng(0)
    chosen = [
        order.choice(len(labels), config.global_batch, replace=False)
        for _ in range(config.steps)
    ]
    return [{"image": images[rows], "label": labels[rows]} for rows in chosen]


def run_alone(dataset: list[dict]) -> dict:
    """Train by `jax.jit` on one device; return the state."""
    step, state = jax.jit(train_step), init(jax.random.key(0))
    for batch in dataset:
        state, _ = step(state, batch)
    return state


def run_under(rep: replicator.Replicator, dataset: list[dict]) -> dict:
    """Train the same step from the same state; return the state."""
    step, state = rep.compile(train_step), rep.put(init(jax.random.key(0)))
    for batch in dataset:
        state, _ = step(state, batch)
    return state


def asks_to_wrap(rep: replicator.Replicator, batch: dict) -> bool:
    """Return whether accumulation is refused by the name of the remedy."""
    step, state = rep.compile(train_step, accumulate=2), rep.init(init)
    try:
        step(state, batch)
    except ArgumentError as error:
        return "wrap_optimizer" in str(error)
    return False


def difference(found: dict, expected: dict) -> float:
    """Return the norm of what two trees differ by, relative to the second's."""
    pairs = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), found, expected)
    return float(optax.tree.norm(pairs) / optax.tree.norm(expected))


def share(state: dict) -> float:
    """Return which share of a state a device holds."""
    leaves = jax.tree.leaves(state)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf.nbytes for leaf in leaves)


def main(config: Config) -> None:
    if "REPLICATOR_FAKE_DEVICES" not in os.environ:
        replicator.fake_devices(config.fake_devices)
    if jax.device_count() == 1:
        raise ArgumentError(
            "`--fake_devices` must be at least 2, over which states are cut, got 1. "
            "Use 8."
        )
    strategies = {
        name: named_strategy(
            name, jax.device_count(), tensor_parallel=TENSOR_PARALLEL, pieces=8
        )
        for name in PARTITIONING
    }
    dataset = batches(config)
    expected, differences, asked = run_alone(dataset), [], 0
    for name, strategy in strategies.items():
        rep = replicator.Replicator(strategy=strategy)
        state = run_under(rep, dataset)
        differences.append(difference(state["params"], expected["params"]))
        asked += asks_to_wrap(rep, dataset[0])
        print(
            f"{name:16} {share(state):4.0%} of the state on a device, "
            f"{differences[-1]:.1e} from one device",
            flush=True,
        )
    found = {
        "worst_difference": max(differences),
        "asked_to_wrap": asked,
        "strategies": len(differences),
        "devices": jax.device_count(),
        "steps": config.steps,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    config_flags.run(main, Config)
