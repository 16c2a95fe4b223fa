"""Train on one island of processes, and go on when it is killed, to the same bits.

    learner ── every k steps, a copy of the state ──▶ keeper
       ▲ killed: its slice goes to a spare process, ◀─── the copy

The state that trains is on one island, and dies with it. A copy (`pw.copy`) is an op
like others: no step waits for it, and it is of one step in all leaves, though the next
steps are given the state's memory. A call on the slice of an island that was killed
waits until the slice is on another one; what the lost one held is refused by
`IslandLostError`, and the loop goes back to the newest copy that had arrived.

An island is killed at random steps. `equal` says that the parameters are at the end,
bit by bit, those of a run that nobody disturbed; `repeated` counts steps that were made
again, at most 3 k for each kill.

    python -m experiments.programs.recover --kills=3
"""

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from experiments import config_flags
from experiments.config_flags import Count, Rate, Settings, Whole
from replicator import controller
from replicator.base.types import PyTree
from replicator.errors import IslandLostError

_CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      steps: Updates.
      every: Updates from copy to copy.
      kills: How many times the island that learns is killed.
      spares: Processes that are kept for it; without, one is started then.
      lost_after_s: Silence after which an island is given up; one that is killed is
        missed at once.
      global_batch: Digits per update.
      width: Features of the hidden layer.
      learning_rate: Of Adam.
      seed: Of initialisation, batches, and when islands are killed.
    """

    steps: Count = 300
    every: Count = 10
    kills: Whole = 3
    spares: Whole = 1
    lost_after_s: Rate = 10.0
    global_batch: Count = 64
    width: Count = 64
    learning_rate: Rate = 1e-2
    seed: Whole = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained: data.

    Attributes:
      step: Takes state and batch; returns state, which counts its updates as "step".
      state: Of the first step.
      batch: Returns the batch of a step.
      steps: Updates.
      every: Updates from copy to copy.
    """

    step: Callable[[PyTree, PyTree], PyTree]
    state: PyTree
    batch: Callable[[int], PyTree]
    steps: int
    every: int


def main(config: Config) -> None:
    """Train twice, undisturbed and not, and print what came of it."""
    training, accuracy = digits(config)
    random = np.random.default_rng(config.seed)
    at = random.choice(np.arange(1, config.steps), config.kills, replace=False)
    processes = controller.start(
        islands=2, devices=1, spares=config.spares, lost_after_s=config.lost_after_s
    )
    with processes as pw:
        on, keeper = pw.slice(1), pw.slice(1)
        wanted, _ = train(pw, training, on, keeper)
        found, repeated = train(pw, training, on, keeper, set(at.tolist()))
    equal = jax.tree.all(jax.tree.map(np.array_equal, wanted, found))
    result = {
        "kills": config.kills,
        "repeated": repeated,
        "equal": bool(equal),
        "accuracy": round(accuracy(found["params"]), 4),
    }
    print(json.dumps(result))


def train(
    pw: controller.Controller,
    training: Training,
    on: controller.Slice,
    keeper: controller.Slice,
    kill_at: Collection[int] = (),
) -> tuple[PyTree, int]:
    """Train on one slice, and keep copies on another.

    Args:
      pw: Its islands are processes.
      training: What is trained.
      on: Where.
      keeper: Where copies are, on another island.
      kill_at: Steps before which the island that learns is killed, each once.

    Returns:
      The last state, as arrays, and how many steps were made again.
    """
    learn, who = pw.fn(training.step, on, donate=(0,)), pw.fn(process_id, on)
    state = pw.put(training.state, on)
    copies = [pw.copy(state, keeper)]
    step = repeated = 0
    left = set(kill_at)
    while True:
        try:
            while step < training.steps:
                if step in left:
                    left.remove(step)
                    os.kill(int(who(np.int32(0))), signal.SIGKILL)
                state, step = learn(state, training.batch(step)), step + 1
                if step % training.every == 0:
                    int(copies[-1]["step"])  # it has arrived, so one more may be made
                    copies = [copies[-1], pw.copy(state, keeper)]
            return controller.read(state), repeated
        except IslandLostError:
            kept = _newest([*copies, state])
            state, copies = pw.copy(kept, on), [pw.copy(kept, keeper)]
            repeated += step - int(kept["step"])
            step = int(kept["step"])


def _newest(states: list[PyTree]) -> PyTree:
    """Return the last state that is still there; it waits for those on their way."""
    for each in reversed(states):
        with contextlib.suppress(IslandLostError):
            int(each["step"])
            return each
    raise ValueError("all states were lost: the islands of both slices died")


def process_id(x: jax.Array) -> jax.Array:
    """Return the process that computes: an op of an island of `controller.start`."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.full_like(x, os.getpid()), shape, x)


def digits(config: Config) -> tuple[Training, Callable[[PyTree], float]]:
    """Return a training on handwritten digits, and a function for its accuracy."""
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16, labels.astype(np.int32)
    is_test = np.arange(len(labels)) % 5 == 0
    tx = optax.adam(config.learning_rate)
    random = np.random.default_rng(config.seed)

    def layer(size: int, features: int) -> np.ndarray:
        scale = np.float32(1 / np.sqrt(size))
        return random.normal(size=(size, features)).astype(np.float32) * scale

    params = [layer(images.shape[1], config.width), layer(config.width, _CLASSES)]

    def logits(params: PyTree, x: Any) -> jax.Array:
        return jax.nn.relu(x @ params[0]) @ params[1]

    def step(state: PyTree, batch: PyTree) -> PyTree:
        def loss(params: PyTree) -> jax.Array:
            rows = logits(params, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(
                rows, batch["label"]
            ).mean()

        grads = jax.grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}

    def batch(step: int) -> PyTree:
        chosen = np.random.default_rng((config.seed, step)).choice(
            np.flatnonzero(~is_test), config.global_batch
        )
        return {"image": images[chosen], "label": labels[chosen]}

    def accuracy(params: PyTree) -> float:
        found = jnp.argmax(logits(params, images[is_test]), axis=-1)
        return float(np.mean(np.asarray(found) == labels[is_test]))

    state = {"params": params, "opt": tx.init(params), "step": np.int32(0)}
    training = Training(
        step=step, state=state, batch=batch, steps=config.steps, every=config.every
    )
    return training, accuracy


if __name__ == "__main__":
    config_flags.run(main, Config)
