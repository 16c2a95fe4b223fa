"""A small run that tells what the calendar says at each of its steps.

    python -m tests.multiprocess.calendar_worker DIRECTORY

It waits for a line on standard input after each step, and prints a hash of its final
parameters.
"""

import hashlib
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

from replicator import Replicator
from replicator.hooks import Hook, every
from replicator.training.watchdog import Limits
from tests.multiprocess.groups import die_with_parent
from tests.steps import regression_batch, trainer


class TellTheCalendar(Hook):
    """Prints the time of day, and waits for a word."""

    def on_state(self, event):
        print("calendar", time.time(), flush=True)
        sys.stdin.readline()


def main(directory):
    directory = Path(directory)
    jax.config.update("jax_platforms", "cpu")
    rep = Replicator(num_replicas=1, compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    result = rep.run(
        step_fn,
        [regression_batch(seed=seed) for seed in range(5)],
        init_fn=init_fn,
        steps=40,
        directory=directory / "run",
        checkpoint_dir=directory / "saved",
        checkpoint_every=every(seconds=1800),
        hooks=[TellTheCalendar()],
        step_timeout=Limits(step_s=60, report_s=60, input_s=60),
        display=False,
    )
    leaves = jax.tree.leaves(jax.device_get(result.state))
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    print("ended", hashlib.sha256(bits).hexdigest(), flush=True)


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
