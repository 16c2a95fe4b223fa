"""Measure how far a device's part of a state is from an equal one."""

import collections
from typing import Any

import jax

from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tasks import Task
from replicator import Replicator, strategies
from replicator.base.types import PyTree


def worst_error(task: Task, tx: Any) -> float:
    """Return the largest error of bytes on a device against an equal part.

    Of the optimizer's state under `zero1`, and of all state under `fsdp`, each after an
    update, from the shards that lie on each device; relative to the equal part.
    """
    under_zero1 = _after_a_step(strategies.zero1(), task, tx)
    under_fsdp = _after_a_step(strategies.fsdp(), task, tx)
    return max(uneven(under_zero1["opt"]), uneven(under_fsdp))


def uneven(tree: PyTree) -> float:
    """Return the largest error of a device's bytes, relative to an equal part.

    >>> mesh = jax.make_mesh((1,), ("shard",))
    >>> uneven(jax.device_put([1.0, 2.0]))
    0.0
    """
    on_device: collections.Counter[Any] = collections.Counter()
    whole = 0
    for leaf in jax.tree.leaves(tree):
        whole += leaf.nbytes
        for shard in leaf.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
    equal = whole / jax.device_count()
    return max(abs(nbytes / equal - 1) for nbytes in on_device.values())


def _after_a_step(strategy: strategies.Strategy, task: Task, tx: Any) -> PyTree:
    rep = Replicator(strategy=strategy)
    state = rep.init(replicator_init(task, tx))
    state, _ = rep.compile(replicator_step(task, tx))(state, task.batch)
    return state
