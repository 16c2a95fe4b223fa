"""The published decoders as problems: `replicator plan` takes them."""

import optax

from benchmarks.plan_published.compiled import RUNS, task_of
from benchmarks.step.step_pair import replicator_init, replicator_step
from replicator import Replicator


def decoder_16b(rep: Replicator) -> tuple:
    """Return the step of 16 billion parameters, 6 sequences of 2,048 to a device."""
    return _decoder(rep, "16B")


def _decoder(rep: Replicator, name: str) -> tuple:
    task = task_of(RUNS[name], rep.mesh.devices.size)
    tx = optax.adamw(1e-3)
    return replicator_step(task, tx), replicator_init(task, tx), task.batch
