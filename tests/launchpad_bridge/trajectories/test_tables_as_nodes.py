"""Both tables as nodes: what they are for other nodes, on threads and processes."""

import contextlib
import gc
import os
import signal
import time
import weakref

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import rpc
from replicator.errors import ReplicatorError
from replicator.launchpad_bridge.learner.trajectory_batches import TrajectoryBatches
from replicator.launchpad_bridge.trajectories.table import TrajectoryError
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns
from tests.launchpad_bridge.trajectories.tables import ACTORS, SOON_S, ids_at, rows

LAUNCHERS = ["threads", pytest.param("processes", marks=pytest.mark.slow)]
UPDATES = 6


def act(table):
    """Do turns, or go on freely; insert something wrong first."""
    actor = lp.context.get_context().worker
    turn, number = table.turn(actor), 0
    while not lp.stop_event().is_set():
        number = number if turn.number is None else turn.number
        good = rows(*ids_at(actor, number), steps=4096)
        arguments = {
            "actor": actor,
            "version": turn.version or 0,
            "number": turn.number,
            "snapshot": b"%d" % number,
        }
        try:
            if number == 1:
                bad = {**good, "reward": good["reward"].astype(np.float16)}
                with pytest.raises(TrajectoryError, match="`reward` is float16"):
                    table.insert(bad, **arguments)
            turn = table.insert(good, **arguments, episodes=[float(number)])
        except ReplicatorError:
            if not lp.stop_event().is_set():
                raise
        number += 1


def batches_of(table):
    return TrajectoryBatches(
        table,
        6,
        is_stopping=lp.stop_event().is_set,
        reached=lambda version, timeout_s: True,
    )


def learn(table):
    """Take some batches; return their ids, and the table's counts."""
    found = []
    batches = batches_of(table)
    while len(found) < UPDATES:
        seen = next(batches)["trajectories"]["observation"]
        pixels, ids = seen["pixels"], seen["id"]
        assert (pixels == ids.astype(np.uint8)[:, None, None]).all()
        found.append(ids.tolist())
    counts = table.statistics()
    lp.stop()
    return found, counts


def run(table, launch_type):
    program = lp.Program("tables")
    handle = program.add_node(table, label="table")
    with program.group("actor"):
        for _ in ACTORS:
            program.add_node(lp.PyNode(act, handle))
    program.add_node(lp.PyNode(learn, handle), label="learner")
    with lp.launch(program, launch_type) as running:
        running.wait(SOON_S * 3)
        return running.results["learner"]


@pytest.mark.parametrize("launch_type", LAUNCHERS)
def test_a_queue_serves_actors_and_a_learner(launch_type):
    found, counts = run(lp.CourierNode(TrajectoryQueue, capacity=24), launch_type)
    taken = [i for batch in found for i in batch]
    assert len(taken) == len(set(taken)) == 6 * UPDATES
    assert counts["inserted"] >= counts["taken"] >= 6 * UPDATES


@pytest.mark.parametrize("launch_type", LAUNCHERS)
def test_turns_are_in_order_and_what_is_refused_is_counted(launch_type):
    node = lp.CourierNode(
        TrajectoryTurns, ACTORS, batch_size=6, rows_per_turn=2, lag=UPDATES
    )
    found, counts = run(node, launch_type)
    assert found == [
        [i for actor in ACTORS for i in ids_at(actor, batch)]
        for batch in range(UPDATES)
    ]
    assert counts["refused"] == dict.fromkeys(ACTORS, 1)


class MortalTurns(TrajectoryTurns):
    """Turns whose process can be found."""

    def pid(self):
        return os.getpid()


class MortalQueue(TrajectoryQueue):
    """A queue whose process can be found."""

    def pid(self):
        return os.getpid()


def act_for_ever(table):
    """Act through the death of the table."""
    while not lp.stop_event().is_set():
        with contextlib.suppress(ReplicatorError):
            act(table)


def learn_and_kill(table):
    """Take batches; kill the table after the second and the fifth one."""
    found, killed = [], set()
    batches = batches_of(table)
    while len(found) < UPDATES + 2:
        ready = next(batches)
        if len(found) in {1, 4}:
            killed.add(pid := table.pid())
            os.kill(pid, signal.SIGKILL)
        found.append(ready["trajectories"]["observation"]["id"].tolist())
    lp.stop()
    return found, len(killed)


def run_and_kill(table):
    program = lp.Program("kills")
    again = lp.Restart(attempts=3, progress_s=0.01, backoff_s=0.05)
    with program.group("table", restart=again):
        handle = program.add_node(table)
    with program.group("actor"):
        for _ in ACTORS:
            program.add_node(lp.PyNode(act_for_ever, handle))
    program.add_node(lp.PyNode(learn_and_kill, handle), label="learner")
    with lp.launch(program, "processes") as running:
        running.wait(SOON_S * 3)
        return running.results["learner"]


@pytest.mark.slow
def test_a_queue_that_is_killed_costs_what_it_held():
    found, killed = run_and_kill(lp.CourierNode(MortalQueue, capacity=24))
    assert len(found) == UPDATES + 2
    assert killed == 2


@pytest.mark.slow
def test_turns_whose_table_is_killed_lose_nothing():
    node = lp.CourierNode(
        MortalTurns, ACTORS, batch_size=6, rows_per_turn=2, lag=UPDATES + 2
    )
    found, killed = run_and_kill(node)
    assert found == [
        [i for actor in ACTORS for i in ids_at(actor, batch)]
        for batch in range(UPDATES + 2)
    ]
    assert killed == 2


def test_more_actors_wait_for_room_than_a_server_has_threads_by_default():
    def insert(table, index):
        table.insert(rows(index), actor=str(index), version=0)

    def take(table):
        while table.statistics()["blocked"] < 19:
            time.sleep(0.001)
        return sum(len(table.take(1, timeout_s=SOON_S).versions) for _ in range(20))

    program = lp.Program("many")
    handle = program.add_node(lp.CourierNode(TrajectoryQueue, capacity=1), label="q")
    with program.group("actor"):
        for index in range(20):
            program.add_node(lp.PyNode(insert, handle, index))
    program.add_node(lp.PyNode(take, handle), label="learner")
    with lp.launch(program, "threads") as running:
        running.wait(SOON_S, labels=["actor", "learner"])
        assert running.results["learner"] == 20


class Watching(TrajectoryQueue):
    """Knows which of the arrays that were inserted are still there."""

    def __init__(self):
        super().__init__(capacity=8)
        self._inserted = []

    def insert(self, trajectories, **options):
        arrays = trajectories["observation"]["pixels"], trajectories["reward"]
        self._inserted += [weakref.ref(array) for array in arrays]
        return super().insert(trajectories, **options)

    def alive(self):
        gc.collect()
        return sum(each() is not None for each in self._inserted)


def test_arrays_in_shared_memory_are_not_held_when_the_insert_is_over(
    quick_collections,
):
    large = rows(1, 2, steps=2**18)  # 2 MiB of floats
    with (
        rpc.Server(Watching(), address="unix:") as server,
        rpc.Client(server.address) as client,
    ):
        client.insert(large, actor="a", version=0)
        assert client.alive() == 0
        taken = client.take(2, timeout_s=SOON_S)
    np.testing.assert_array_equal(taken.trajectories["reward"], large["reward"])
