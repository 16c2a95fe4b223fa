"""Train with copies in memory, as one process of a group that loses one of its own.

It prints `here RANK ATTEMPT PID`, and for each step that was done `step NUMBER TIME`,
by the machine's monotonic clock.
"""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import replicator
from replicator.base.types import PyTree
from replicator.hooks import Callback, MetricsEvent, every

_DIRECTORY = flags.DEFINE_string("directory", None, "Of the run.", required=True)
_MEGABYTES = flags.DEFINE_integer("megabytes", 100, "Size of the state.")
_EVERY = flags.DEFINE_integer("every", 5, "Steps from copy to copy.")
_STEPS = flags.DEFINE_integer("steps", 100_000, "Steps of the whole run.")
_PACE_S = flags.DEFINE_float("pace_s", 0.1, "Least time of a step, as of a real one.")
_WIDTH = 256


def tell(event: MetricsEvent) -> None:
    """Print that a step was done."""
    print("step", event.step, time.monotonic(), flush=True)
    time.sleep(_PACE_S.value)


def main(argv: list[str]) -> None:
    del argv
    replicator.distributed.initialize()
    rank, attempt = (
        os.environ.get(name, "0")
        for name in ("REPLICATOR_PROCESS_ID", "REPLICATOR_ATTEMPT")
    )
    print("here", rank, attempt, os.getpid(), flush=True)
    rep = replicator.Replicator()
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))
    rows = _MEGABYTES.value * 10**6 // (4 * _WIDTH)

    def init_fn(key: PyTree) -> PyTree:
        params = {"w": jnp.zeros((_WIDTH, 1))}
        table = jnp.zeros((rows, _WIDTH))  # most of the state; each step changes all
        return {"params": params, "opt": optimizer.init(params), "table": table}

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def loss_fn(params: PyTree) -> PyTree:
            return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt": opt, "table": state["table"] + 1}
        return after, {"loss": loss}

    batch = {"x": np.ones((8, _WIDTH), np.float32)}
    rep.run(
        step_fn,
        [batch],
        init_fn=init_fn,
        steps=_STEPS.value,
        checkpoint_dir=_DIRECTORY.value,
        checkpoint_every=_STEPS.value,
        memory_copy_every=_EVERY.value,
        hooks=[Callback(tell, every(n_steps=1))],
        display=False,
    )


if __name__ == "__main__":
    app.run(main)
