"""Functions that groups of processes run in programs."""

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils

import replicator
import replicator.launchpad_bridge as lp
from replicator import distributed
from replicator.hooks import Hook
from tests.multiprocess.worker_nodes import tell
from tests.steps import regression_batch, trainer

CPU = lp.Resources(env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"})


class Adder:
    """A server that members of a group call."""

    def __init__(self):
        self._sum = 0

    def add(self, number):
        self._sum += number
        return self._sum


def total(number):
    """Sum over the devices of all processes, by a collective of JAX."""
    parts = multihost_utils.process_allgather(
        jnp.full((), number + jax.process_index())
    )
    return int(parts.sum()), jax.process_count(), jax.process_index()


def call(adder):
    """Call a server from each process; return what the group did altogether."""
    adder.add(1)
    return distributed.exchange("who", os.getpid())


def meet_again(folder, attempts):
    """Wait to be killed, in all starts but the last; then return which that was."""
    attempt = lp.context.get_context().attempt
    rank = os.environ["REPLICATOR_PROCESS_ID"]
    distributed.barrier("here")
    tell(Path(folder) / f"{attempt}-{rank}", f"{os.getpid()}")
    if attempt + 1 < attempts:
        lp.wait_for_stop()
    return distributed.exchange("attempt", [attempt, os.environ["REPLICATOR_ATTEMPT"]])


def fail_in_one(rank):
    """Raise in one process, while the others wait in a collective for it."""
    if jax.process_index() == rank:
        raise KeyError("a bug")
    total(0)


def stop_together(folder):
    """Run until the program stops."""
    rank = os.environ["REPLICATOR_PROCESS_ID"]
    tell(Path(folder) / rank, f"{os.getpid()}")
    lp.wait_for_stop()
    return distributed.exchange("end", rank)


def hang(folder):
    """Tell who it is, and take no notice of anything."""
    rank = os.environ["REPLICATOR_PROCESS_ID"]
    tell(Path(folder) / rank, f"{os.getpid()}")
    time.sleep(600)


class StopProgram(Hook):
    """Asks for the stop of the program, from one process, at a step."""

    def on_state(self, event):
        if event.step == 3:
            lp.stop()


def train_until_stop(folder):
    """Train for ever; return at which step the program's stop ended that."""
    rep = replicator.Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    result = rep.run(
        step_fn,
        [regression_batch(seed=seed) for seed in range(8)],
        init_fn=init_fn,
        steps=10**6,
        checkpoint_dir=folder,
        hooks=[StopProgram()] if jax.process_index() == 1 else [],
        display=False,
        node=lp.context.get_context(),
    )
    return result.step


class DieOnce(Hook):
    """Kills its process at a step, in the first start of its group."""

    def on_state(self, event):
        if event.step == 5 and lp.context.get_context().attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, dies):
    """Train over the devices of all processes; return replicas, and the parameters."""
    rep = replicator.Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    result = rep.run(
        step_fn,
        [regression_batch(seed=seed) for seed in range(8)],
        init_fn=init_fn,
        steps=8,
        checkpoint_dir=folder,
        checkpoint_every=2,
        hooks=[DieOnce()] if dies and jax.process_index() == 1 else [],
        display=False,
    )
    params = jax.tree.map(lambda leaf: leaf.addressable_data(0), result.state["params"])
    return rep.num_replicas, jax.device_get(params)
