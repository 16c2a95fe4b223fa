"""Train a few steps as one of two processes, and print the group and the loss.

    python -m benchmarks.launchers.train [jax]

With `jax` JAX's own `initialize` makes the group. Each process draws examples of its
own: one that is alone, or in another's place, has another loss.
"""

import json
import os
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from replicator import distributed
from replicator.inputs import InputContext

STEPS = 20
DEVICES = 2


def train() -> dict[str, object]:
    """Join the group and train; return the values that are compared."""
    replicator.fake_devices(DEVICES)
    group = distributed.initialize()
    rep = replicator.Replicator(compilation_cache=False)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key: jax.Array) -> dict:
        params = {"w": jnp.zeros(4)}
        return {"params": params, "opt": optimizer.init(params)}

    def loss_fn(params: dict, batch: dict) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    def step_fn(state: dict, batch: dict) -> tuple[dict, dict]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    result = rep.run(step_fn, _examples, init_fn=init_fn, steps=STEPS, display=False)
    return {
        "kind": group.kind if group else None,
        "processes": jax.process_count(),
        "replicas": rep.num_replicas,
        "loss": float(result.metrics["loss"]),
    }


def _examples(context: InputContext) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(context.pipeline_index)
    while True:
        yield {
            "x": random.normal(size=(8, 4)).astype(np.float32),
            "y": random.normal(size=8).astype(np.float32),
        }


def main() -> None:
    if "jax" in sys.argv[1:]:
        jax.distributed.initialize(
            os.environ["REPLICATOR_COORDINATOR"],
            int(os.environ["REPLICATOR_NUM_PROCESSES"]),
            int(os.environ["REPLICATOR_PROCESS_ID"]),
        )
    # One write: two processes may share the output.
    sys.stdout.write(f"trained {json.dumps(train())}\n")


if __name__ == "__main__":
    main()
