"""A program in turns learns from the same batches, whoever of it was killed."""

import os
import signal

import jax
import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.acting import Actor, from_gymnasium_envs
from replicator.launchpad_bridge.learner.published import PublishedVariables
from replicator.launchpad_bridge.trajectories.table import Cut
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns
from tests.launchpad_bridge.acting.counter import (
    GoesBack,
    initial_core,
    policy,
    variables_of,
)
from tests.launchpad_bridge.acting.test_environments import equal

SIZE, LENGTH, BATCHES, LAG = 2, 5, 10, 2
ACTORS = ["actors/0", "actors/1", "actors/2"]
SOON_S = 180.0


class Learner:
    """Takes batches, publishes; goes back to its checkpoint where it is told to."""

    def __init__(self, goes_back):
        self._goes_back = goes_back
        self._published = PublishedVariables(keep=LAG + 1)
        self._table = self._new_table()

    def _new_table(self):
        return TrajectoryTurns(ACTORS, batch_size=2 * SIZE, rows_per_turn=SIZE, lag=LAG)

    def insert(self, trajectories, **said):
        return self._table.insert(trajectories, **said)

    def turn(self, actor):
        return self._table.turn(actor)

    def get_variables(self, names=None, *, newer_than=None, version=None, timeout_s):
        return self._published.get(
            names, newer_than=newer_than, version=version, timeout_s=timeout_s
        )

    def _begin(self, cut):
        batch = 0 if cut is None else cut.batch
        self._table.begin(cut and Cut.from_json(cut.to_json()))
        for version in range(max(0, batch - LAG), batch + 1):
            self._published.publish(version, variables_of(version))

    def run(self):
        batches, cuts = {}, {0: None}
        self._begin(None)
        while len(batches) < BATCHES:
            number = len(batches)
            taken = self._table.take(2 * SIZE, timeout_s=SOON_S)
            batches[number] = taken.trajectories, taken.versions, list(taken.episodes)
            cuts[number + 1] = taken.cut
            self._published.publish(number + 1, variables_of(number + 1))
            if number == 7 and self._goes_back:
                self._goes_back = False
                for lost in range(4, 8):
                    del batches[lost]
                self._table = self._new_table()
                self._begin(cuts[4])
        lp.stop()
        return list(batches.values())


class Dying(GoesBack):
    """Dies at its 23rd step, once."""

    def __init__(self, index):
        super().__init__()
        self._left = 23 if index == 1 and not attempt() else None

    def step(self, action):
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                die()
        return super().step(action)


def attempt():
    return lp.context.get_context().attempt


def die():
    if lp.context.get_context().launcher == "threads":
        raise RuntimeError("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def make(index):
    return from_gymnasium_envs([GoesBack] * SIZE)


def make_dying(index):
    return from_gymnasium_envs([lambda: Dying(index)] * SIZE)


def batches_of(launch_type="threads", *, make=make, goes_back=False, **options):
    program = lp.Program("turns")
    node = lp.CourierNode(Learner, goes_back)
    learner = program.add_node(node, label="learner")
    with program.group("actors", restart=lp.Restart(attempts=1, backoff_s=0.01)):
        for index in range(len(ACTORS)):
            node = lp.PyClassNode(
                Actor,
                *(make, policy, initial_core, learner),
                index=index,
                unroll_length=LENGTH,
                is_deterministic=True,
                **options,
            )
            program.add_node(node)
    with lp.launch(program, launch_type) as run:
        run.wait(SOON_S)
    return run.results["learner"]


@pytest.fixture(scope="module")
def undisturbed():
    return batches_of()


def test_batches_are_acted_with_variables_of_the_fixed_lag(undisturbed):
    versions = [set(versions.tolist()) for _, versions, _ in undisturbed]
    assert versions == [{max(0, batch - LAG)} for batch in range(BATCHES)]


def test_a_second_run_has_the_same_batches(undisturbed):
    assert equal(batches_of(), undisturbed)


def test_a_killed_actor_changes_no_batch(undisturbed):
    assert equal(batches_of(make=make_dying), undisturbed)


def test_a_learner_that_goes_back_to_its_checkpoint_changes_no_batch(undisturbed):
    assert equal(batches_of(goes_back=True), undisturbed)


def test_a_killed_actor_and_a_learner_that_goes_back_change_no_batch_together():
    options = {"one_episode_per_trajectory": True}
    disturbed = batches_of(make=make_dying, goes_back=True, **options)
    assert equal(disturbed, batches_of(**options))


@pytest.mark.slow
def test_an_actor_of_another_process_that_is_killed_changes_no_batch(undisturbed):
    assert equal(batches_of("processes", make=make_dying), undisturbed)
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.size > 0, undisturbed[0][0]))
