"""A small step to choose a strategy for; other processes import this file."""

import os

import jax
import numpy as np

import replicator
from replicator.strategies import data_parallel, fsdp
from tests.steps import adam, regression_batch, trainer

BATCH = jax.tree.map(np.asarray, regression_batch())
STRATEGIES = [data_parallel(), fsdp(whole_below_bytes=0)]


def plain(rep=replicator):
    """Return a step, its first state and a batch."""
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    return step_fn, init_fn, BATCH


def deadly():
    """Return the same; where all devices are one replica, it ends another process."""
    step_fn, init_fn, batch = plain()
    here = os.getpid()

    def dies(state, batch):
        if replicator.num_replicas() == 1 and os.getpid() != here:
            os.abort()
        return step_fn(state, batch)

    return dies, init_fn, batch
