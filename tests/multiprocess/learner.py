"""A small run that saves every step.

    python -m tests.multiprocess.learner DIRECTORY ["without locks" | "stalls"]

Without locks as on a file system that has none; or its input stalls after some steps.
SIGUSR1 shows where it is.
"""

import errno
import faulthandler
import fcntl
import itertools
import signal
import sys
import threading

import jax
import optax

from replicator import Replicator
from replicator.hooks import Hook
from tests.multiprocess.groups import die_with_parent
from tests.steps import regression_batch, trainer


class Announce(Hook):
    """Prints each step, at a pace that a test can follow."""

    def on_state(self, event):
        jax.block_until_ready(event.state)
        print("step", event.step, flush=True)


def refuse(handle, operation):
    raise OSError(errno.ENOLCK, "No locks available")


def batches(*, stalls):
    for seed in itertools.count():
        if stalls and seed == 40:
            threading.Event().wait()
        yield regression_batch(seed=seed)


def main(directory, *options):
    if "without locks" in options:
        fcntl.flock = refuse
    jax.config.update("jax_platforms", "cpu")
    rep = Replicator(num_replicas=1, compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    rep.run(
        step_fn,
        batches(stalls="stalls" in options),
        init_fn=init_fn,
        steps=1_000_000,
        checkpoint_dir=directory,
        checkpoint_every=1,
        hooks=[Announce()],
        display=False,
    )


if __name__ == "__main__":
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main(*sys.argv[1:])
