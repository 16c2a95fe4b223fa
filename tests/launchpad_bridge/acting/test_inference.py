"""A central node acts for many actors: in few shapes, and through its restarts."""

import functools
import os
import signal
import threading

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import rpc
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting import (
    Actor,
    InferenceServer,
    LocalInference,
    inference,
)
from replicator.launchpad_bridge.acting.inference import RemoteInference
from replicator.launchpad_bridge.acting.local_inference import run_mapped
from replicator.launchpad_bridge.acting.waiting import Waiting
from tests.launchpad_bridge.acting.counter import (
    WIDTH,
    initial_core,
    policy,
    published,
    variables_of,
)
from tests.launchpad_bridge.acting.tables import FreeTable, LearnerNode
from tests.launchpad_bridge.acting.test_actor import LENGTH, SIZE, make, make_actor
from tests.launchpad_bridge.acting.test_environments import equal

SOON_S = 180.0


class Versions:
    """A learner whose version a test sets."""

    def __init__(self):
        self.version = 0

    def get_variables(self, *, newer_than=None, timeout_s):
        return None if newer_than == self.version else published(self.version)


def server(learner=None, **options):
    made = InferenceServer(policy, learner or Versions(), timeout_s=0.0, **options)
    made.refresh()
    return made


def remote(made, index=0):
    waiting = Waiting("actor/0", threading.Event())
    return RemoteInference(made, waiting, seed=1, index=index)


def seen(draw, size=SIZE):
    rng = np.random.default_rng(draw)
    place = rng.normal(size=(size, WIDTH)).astype(np.float32)
    first = rng.integers(2, size=size).astype(bool)
    core = rng.normal(size=(size, WIDTH)).astype(np.float32)
    return {"place": place, "count": np.zeros(size, np.int32)}, first, core


@pytest.mark.parametrize("steps", [0, 7])
def test_it_acts_as_an_actor_would_by_itself(steps):
    local = LocalInference(policy, seed=1, index=2)
    local.use(variables_of(0))
    action, extras, core = local(*seen(0), steps)
    found = remote(server(), index=2)(*seen(0), steps)
    assert equal(found[0], action)
    np.testing.assert_allclose(found[1]["logits"], extras["logits"], rtol=1e-5)
    np.testing.assert_allclose(found[2], core, rtol=1e-5)


def placed_policy(variables, observation, first, core, key, *, steps, index):
    n = first.shape[0]
    place = np.int32(1000) * index + steps
    return jax.numpy.full(n, place), {}, core


def test_a_policy_that_asks_is_told_its_actor_and_how_far_it_is():
    local = LocalInference(placed_policy, seed=1, index=2)
    local.use({})
    made = InferenceServer(placed_policy, Versions(), timeout_s=0.0)
    made.refresh()
    for act in (local, remote(made, index=2)):
        assert np.asarray(act(*seen(0), 7)[0]).tolist() == [2007] * SIZE


def test_what_a_policy_has_a_value_for_is_its_own():
    settled = functools.partial(placed_policy, index=np.int32(5))
    local = LocalInference(settled, seed=1, index=2)
    local.use({})
    assert np.asarray(local(*seen(0), 7)[0]).tolist() == [5007] * SIZE


def at_once(made, calls):
    """Call for so many actors, each from a thread."""
    found, start = {}, threading.Barrier(calls)

    def call(index):
        start.wait()
        found[index] = remote(made, index)(*seen(index), 0)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def batching(calls):
    """Return a server that waits until so many calls are there."""
    made = InferenceServer(policy, Versions(), batch_size=calls, timeout_s=SOON_S)
    made.refresh()
    return made


def test_calls_run_together_and_each_gets_its_own():
    made = batching(5)
    for index, (action, extras, _) in at_once(made, 5).items():
        alone = remote(server(), index)(*seen(index), 0)
        assert equal(action, alone[0])
        np.testing.assert_allclose(extras["logits"], alone[1]["logits"], rtol=1e-5)
    assert made.statistics() == {
        "batches": 1,
        "calls": 5,
        "rows": 5 * SIZE,
        "version": 0,
    }


def test_batches_are_compiled_for_powers_of_two_only():
    run_mapped.clear_cache()
    for calls in (5, 6, 7, 8, 3):
        at_once(batching(calls), calls)
    assert run_mapped._cache_size() == 2


def test_variables_are_those_of_the_learner_also_when_it_went_back():
    learner = Versions()
    made = server(learner)
    for version in (5, 2):
        learner.version = version
        assert made.refresh()
        assert not made.refresh()
        assert made.statistics()["version"] == version
    act = remote(made)
    _, extras, _ = act(*seen(0), 0)
    local = LocalInference(policy, seed=1, index=0)
    local.use(variables_of(2))
    np.testing.assert_allclose(
        extras["logits"], local(*seen(0), 0)[1]["logits"], rtol=1e-5
    )


def test_a_trajectory_is_of_the_oldest_version_that_acted_in_it():
    class NewAtEachStep(InferenceServer):
        def act(self, *args):
            self._learner.version += 1
            self.refresh()
            return super().act(*args)

    learner, table = Versions(), FreeTable()
    made = NewAtEachStep(policy, learner, timeout_s=0.0)
    made.refresh()
    counts = make_actor(table, inference=made, episodes=6).run()
    versions = [version for _, version, *_ in table.inserted]
    assert versions == [1 + LENGTH * number for number in range(len(versions))]
    assert counts["version"] == versions[-1]


def test_actors_wait_for_an_inference_node_that_starts_again(caplog, tmp_path):
    class Dies(InferenceServer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.hangs, self.over, self.number = *(threading.Event() for _ in "ab"), 0

        def act(self, *args):
            self.number += 1
            if self.number == 7:
                self.hangs.set()
                self.over.wait()
            return super().act(*args)

    table, first = FreeTable(), Dies(policy, Versions(), timeout_s=0.0)
    first.refresh()
    before = rpc.Server(first, address=f"unix:{tmp_path}/inference").start()
    with rpc.Client(before.address, wait_for_ready=False) as client:
        actor = make_actor(table, inference=client, episodes=12)
        thread = threading.Thread(target=actor.run)
        thread.start()
        first.hangs.wait()
        before.stop(drain_s=0.01)
        with rpc.Server(server(), address=before.address):
            thread.join()
        first.over.set()
    undisturbed = FreeTable()
    make_actor(undisturbed, inference=server(), episodes=12).run()
    assert equal(table.inserted, undisturbed.inserted)
    assert actor.statistics()["waits"] == 1
    assert "actor/3 waits for inference: " in caplog.text


def test_calls_of_new_forms_are_compiled_to_a_number(monkeypatch):
    monkeypatch.setattr(inference, "_MOST_FORMS", 2)
    made, ids = server(), (np.zeros(2, np.uint32), np.zeros(2, np.int32))
    wrong, first, core = seen(0)
    with pytest.raises(Exception, match="place"):  # of no policy: it counts for none
        made.act({"elsewhere": wrong["place"]}, first, core, *ids)
    for size in (1, 2):
        made.act(*seen(0, size), *ids)
    with pytest.raises(ArgumentError, match="`observation` must be of at most 2 forms"):
        made.act(*seen(0, 3), *ids)
    made.act(*seen(1, 2), *ids)


def test_calls_at_once_are_of_no_more_forms(monkeypatch):
    monkeypatch.setattr(inference, "_MOST_FORMS", 2)
    made, found = InferenceServer(policy, Versions(), timeout_s=0.0), []
    ids = np.zeros(2, np.uint32), np.zeros(2, np.int32)

    def call(size):
        try:
            found.append(made.act(*seen(0, size), *ids))
        except ArgumentError:
            return

    threads = [threading.Thread(target=call, args=(size,)) for size in range(1, 7)]
    for thread in threads:
        thread.start()
    made.refresh()  # the variables that all of them may wait for
    for thread in threads:
        thread.join()
    assert len(found) == 2


def test_a_server_with_too_few_threads_for_its_batches_says_so(caplog):
    with rpc.Server(server(batch_size=16), pool_size=4):
        assert "`act` merges 16 calls, and `pool_size` is 4" in caplog.text


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"refresh_s": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ArgumentError, match=f"`{next(iter(wrong))}` must be"):
        InferenceServer(policy, Versions(), **wrong)


class Killed(InferenceServer):
    """Is killed when it has run twenty batches, once."""

    def _act(self, *args):
        is_first = lp.context.get_context().attempt == 0
        if is_first and self.statistics()["batches"] == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._act(*args)


def acted(launch_type, *, inserts=40, server=InferenceServer):
    """Run a program of two actors and one inference node; return its run."""
    program = lp.Program("acting")
    learner = program.add_node(lp.CourierNode(LearnerNode, inserts), label="learner")
    with program.group("inference", restart=lp.Restart(attempts=1, backoff_s=0.01)):
        inference = program.add_node(
            lp.CourierNode(server, policy, learner, batch_size=2, refresh_s=1e-3)
        )
    with program.group("actors"):
        for index in range(2):
            node = lp.PyClassNode(
                Actor,
                *(make, policy, initial_core, learner),
                inference=inference,
                index=index,
                unroll_length=LENGTH,
            )
            program.add_node(node)
    with lp.launch(program, launch_type) as run:
        run.wait(SOON_S)
    return run


@pytest.mark.parametrize(
    "launch_type", ["threads", pytest.param("processes", marks=pytest.mark.slow)]
)
def test_a_program_acts_by_one_node_and_its_variables_follow(launch_type):
    run = acted(launch_type)
    names, versions = run.results["learner"]
    assert names == {"actors/0", "actors/1"}
    assert max(versions) > 0
    assert [count["refused"] for count in run.results_of("actors")] == [0, 0]


@pytest.mark.slow
def test_actors_go_on_when_their_inference_node_is_killed():
    run = acted("processes", server=Killed)
    # Those whose call was lost; another waits inside of its client.
    assert any(count["waits"] for count in run.results_of("actors"))
    assert [count["lost"] for count in run.results_of("actors")] == [0, 0]
