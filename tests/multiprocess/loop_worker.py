"""One of several processes that make steps together: a collective, a loop, its hooks.

    python -m tests.multiprocess.loop_worker PORT COUNT RANK DIRECTORY LIMIT_S FAULTS

With the fault "sleep in step" the compiled step calls Python, which sleeps.
Nothing but the loop: that a whole run works over processes is tested elsewhere.
"""

import functools
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.distributed.notices import open_notices
from replicator.engine.run_ahead import RunAhead
from replicator.hooks import Hook
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases
from replicator.testing import faults
from replicator.training.options import LoopPlan
from replicator.training.preemption.preemption import Preemption
from replicator.training.preemption.stop_agreement import StopAgreement
from replicator.training.watchdog import Limits, Watchdog
from tests.loops import run_loop
from tests.multiprocess.groups import die_with_parent

STEPS = 1_000_000  # more than a signal takes to come


class Batches:
    """As many batches as there are asked for, each the same."""

    stall_s = 0.0

    def __init__(self, value):
        self._batch = types.SimpleNamespace(
            value=value, examples=1, steps=1, position=None
        )

    def __next__(self):
        return self._batch

    def close(self):
        pass


class Announce(Hook):
    """Prints each step, so that a test knows how far a process is."""

    def on_state(self, event):
        print("step", event.step, flush=True)


def sleep_in_step_5(total, processes):
    if total >= 4 * processes:
        threading.Event().wait()
    return np.float32(0)


def make_step(mesh, *, sleeps):
    run_ahead = RunAhead(1)

    def add_all(state, rows):
        own = rows.sum()
        if sleeps:
            sleep = functools.partial(sleep_in_step_5, processes=mesh.size)
            own += jax.pure_callback(sleep, jax.ShapeDtypeStruct((), own.dtype), state)
        return state + jax.lax.psum(own, "replica")

    program = jax.jit(
        jax.shard_map(
            add_all,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("replica")),
            out_specs=PartitionSpec(),
        )
    )

    def step(state, batch):
        state = program(state, batch.value)
        run_ahead.admit(state)
        return state, {}

    return step


def main(port, processes, rank, directory, limit_s, schedule):
    rank, processes = int(rank), int(processes)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("replica")), np.ones(1, np.float32)
    )
    state = jax.jit(lambda: jnp.zeros(()), out_shardings=everywhere)()
    directory, phases, notices = Path(directory), Phases(), open_notices()
    tell = EventLog(directory, process=rank).write
    limits = Limits(**dict.fromkeys(("step_s", "report_s", "silent_s"), float(limit_s)))
    sleeps = schedule == "sleep in step"
    preemption = Preemption(StopAgreement(notices))
    broken = faults.Injector(
        () if sleeps else faults.parse(schedule), journal=directory / "faults.jsonl"
    )
    with (
        Watchdog(phases, limits=limits, directory=directory, notices=notices, log=tell),
        preemption,
    ):
        result = run_loop(
            make_step(mesh, sleeps=sleeps and rank == 1),
            state,
            Batches(rows),
            plan=LoopPlan(steps=STEPS),
            hooks=[preemption, broken, Announce()],
            phases=phases,
        )
    total = float(np.asarray(result.state.addressable_shards[0].data))
    print("ended", result.step, total, flush=True)
    jax.distributed.shutdown()
    if preemption.stop is not None:
        preemption.stop.raise_saved()


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
