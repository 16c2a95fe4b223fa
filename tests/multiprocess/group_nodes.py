"""Functions that groups of processes run in programs."""

import os
import time
from pathlib import Path

import replicator.launchpad_bridge as lp
from replicator import distributed
from tests.multiprocess.worker_nodes import tell

CPU = lp.Resources(env={"JAX_PLATFORMS": "cpu"})


class Adder:
    """A server that members of a group call."""

    def __init__(self):
        self._sum = 0

    def add(self, number):
        self._sum += number
        return self._sum


def total(number):
    """Sum over the devices of all processes, by a collective of JAX."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

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
    import jax

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
