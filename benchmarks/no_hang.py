"""Run a plain loop that never blocks, many times: none may hang, abort or go astray.

On fake CPU devices such a loop aborts a naive program after 40 s: its steps in flight
take all threads of XLA's pool, and a collective waits for threads that never come. Here
each run is a process of its own, killed after a limit; it fails unless it ends by
itself, with a loss that fell.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import replicator
from replicator.base.types import Key, PyTree

_DEVICES = flags.DEFINE_multi_integer("devices", [2, 8, 16], "Device counts, in turn.")
_RUNS = flags.DEFINE_integer("runs", 20, "Processes in all.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of each.")
_LIMIT_S = flags.DEFINE_float("limit_s", 120.0, "Seconds until a run is killed.")
_TRAIN = flags.DEFINE_bool("train", False, "Be one of the runs, on the first count.")


def train(*, devices: int, steps: int) -> tuple[float, float]:
    """Train a small convolution net; return the first loss and the last."""
    replicator.fake_devices(devices)
    rep = replicator.Replicator()
    optimizer = rep.wrap_optimizer(optax.adam(1e-2))

    def init_fn(key: Key) -> PyTree:
        params = {
            "filters": jax.random.normal(key, (3, 3, 1, 8)) / 3,
            "kernel": jnp.zeros((8, 10)),
        }
        return {"params": params, "opt": optimizer.init(params)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            batch["image"],
            params["filters"],
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        logits = jax.nn.relu(x).mean((1, 2)) @ params["kernel"]
        labels = batch["label"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    batch = _examples(4 * devices)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return float(losses[0]), float(losses[-1])


def run_once(*, devices: int, steps: int, limit_s: float) -> str | None:
    """Train in a process of its own; return what went wrong, or None."""
    command = [sys.executable, "-m", "benchmarks.no_hang", "--train"]
    arguments = [f"--devices={devices}", f"--steps={steps}"]
    try:
        # On its timeout `run` kills by SIGKILL: a stuck process heeds nothing else.
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"killed after {limit_s:g} s"
    if done.returncode != 0:
        return f"exit status {done.returncode}: {_last_line(done.stderr)}"
    return None


def run_all(devices: Sequence[int], *, runs: int, steps: int, limit_s: float) -> int:
    """Run so many processes over the device counts; return how many failed."""
    failures = 0
    for index in range(runs):
        count = devices[index % len(devices)]
        started_s = time.monotonic()
        problem = run_once(devices=count, steps=steps, limit_s=limit_s)
        failures += problem is not None
        took = f"{time.monotonic() - started_s:5.1f} s"
        print(f"run {index + 1:2}: {count:2} devices, {took}, {problem or 'ended'}")
    return failures


def _examples(count: int) -> PyTree:
    """Return images whose label is how bright they are: quickly learned."""
    labels = np.arange(count, dtype=np.int32) % 10
    noise = np.random.default_rng(0).standard_normal((count, 8, 8, 1), np.float32)
    return {
        "image": labels[:, None, None, None] / np.float32(5) + noise / 10,
        "label": labels,
    }


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def main(argv: list[str]) -> None:
    del argv
    devices, steps = _DEVICES.value, _STEPS.value
    if _TRAIN.value:
        first, last = train(devices=devices[0], steps=steps)
        if not last < first:
            sys.exit(f"the loss must fall, got {first} at first and {last} at last.")
        return
    failures = run_all(devices, runs=_RUNS.value, steps=steps, limit_s=_LIMIT_S.value)
    result = {
        "failures": failures,
        "runs": _RUNS.value,
        "steps": steps,
        "devices": devices,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
