"""A learner of several processes: one handle, one answer, one restart."""

import functools
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.checkpoint.commit import list_steps
from replicator.hooks import Hook
from tests.launchpad_bridge.learner import learning
from tests.multiprocess import group_nodes
from tests.steps import assert_equal_bits

pytestmark = pytest.mark.slow

TIMEOUT_S = 300.0


def program_of(*, steps=6, turns=True, processes=2, make=None, **options):
    program = lp.Program("impala")
    if turns:
        options |= {"table": learning.turns(2, 8), "fixed_lag": 1}
    node = lp.ReplicatedLearnerNode(
        learning.step_fn,
        learning.init_fn,
        steps=steps,
        batch_size=8,
        processes=processes,
        display=False,
        **options,
    )
    restart = lp.Restart(attempts=3, backoff_s=0.1)
    with program.group("learner", resources=group_nodes.CPU, restart=restart):
        learner = program.add_node(node)
    learning.actors(program, learner, count=2, turns=turns, make=make)
    return program


def test_two_processes_learn_what_one_does(running):
    found = []
    for processes in (1, 2):
        with running(program_of(processes=processes)) as run:
            run.wait(TIMEOUT_S, labels=["learner"])
            found.append(run.results["learner"])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *[each["variables"] for each in found])
    assert found[1]["metrics"]["policy_lag"] == 1.0


def test_threads_processes_and_a_cluster_learn_the_same_bits(running):
    with lp.launch(program_of(processes=1, replicas=1), "threads") as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        here = run.results["learner"]["variables"]
    with running(program_of(processes=1, replicas=1)) as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        assert_equal_bits(here, run.results["learner"]["variables"])


class DieOnce(Hook):
    """Kills one process of a learner, in its first start."""

    def __init__(self, rank):
        self._rank = rank

    def on_state(self, event):
        is_first = lp.context.get_context().attempt == 0
        if event.step == 5 and is_first and jax.process_index() == self._rank:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole():
    """Variables after 12 updates of two processes that nothing happens to."""
    with lp.launch(program_of(steps=12), "processes") as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        return run.results["learner"]["variables"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learner_that_lost_a_process_ends_with_the_same_bits(rank, whole, tmp_path):
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    program = program_of(steps=12, hooks=[DieOnce(rank)], **saved)
    with lp.launch(program, "processes") as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        assert run.workers["learner/0"].attempt == 1
        assert_equal_bits(run.results["learner"]["variables"], whole)


class TermOnce(Hook):
    """Sends SIGTERM to one process of a learner, in its first start."""

    def __init__(self, rank):
        self._rank = rank

    def on_state(self, event):
        is_first = lp.context.get_context().attempt == 0
        if event.step == 5 and is_first and jax.process_index() == self._rank:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("processes", "rank"),
    [
        (1, 0),
        pytest.param(2, 0, marks=pytest.mark.nightly),
        pytest.param(2, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_preempted_learner_is_saved_and_goes_on_with_the_same_bits(
    processes, rank, tmp_path
):
    ended = []
    for hooks in ([TermOnce(rank)], []):
        saved = {"checkpoint_dir": tmp_path / str(len(hooks)), "checkpoint_every": 100}
        program = program_of(steps=12, processes=processes, hooks=hooks, **saved)
        with lp.launch(program, "processes", stop_grace_s=60.0) as run:
            run.wait(TIMEOUT_S, labels=["learner"])
            attempts = {run.workers[name].attempt for name in run.workers}
        assert attempts == {0, len(hooks)}
        ended.append(run.results_of("learner")[0]["variables"])
    steps = list_steps(tmp_path / "1")
    assert steps[-1] == 12
    assert min(steps) < 12  # of the stop: there is no other before the end
    assert_equal_bits(*ended)


def make_one_leave(index):
    """Make environments, of which those of actor 1 lose their process in a while."""
    if index == 1:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return learning.make_environment(index)


def test_a_run_whose_turn_nobody_takes_any_more_ends_at_once_and_says_who_left():
    program = program_of(steps=None, processes=1, make=make_one_leave)
    words = "`actor/1` was preempted: it got SIGTERM, not from its launcher"
    launched = lp.launch(program, "processes")
    with pytest.raises(lp.NodeFailedError, match=words), launched as run:
        run.wait(TIMEOUT_S)


def test_a_group_stops_with_its_program_saved(tmp_path):
    program = program_of(steps=None, turns=False, checkpoint_dir=tmp_path)
    with lp.launch(program, "processes", stop_grace_s=60.0) as run:
        client = program.groups["learner"][0].create_handle().dereference()
        while client.get_variables().version < 3:
            time.sleep(0.01)
        assert client.save() in list_steps(tmp_path)
    one, other = run.results_of("learner")
    assert one["step"] == other["step"] == list_steps(tmp_path)[-1]
