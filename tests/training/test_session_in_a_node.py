"""A session in a node of a program: it stops with it, and a hang fails the node."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import optax
import pytest

import replicator
import replicator.launchpad_bridge as lp
from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError, NodeFailedError
from replicator.exit_codes import HUNG
from replicator.hooks import Hook
from replicator.training.watchdog import Limits
from tests.steps import assert_equal_bits, regression_batch, replicas, trainer

ROOT = Path(__file__).parents[2]
BATCHES = [regression_batch(seed=seed) for seed in range(4)]


def parts():
    rep = replicas(2)
    return rep, *trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))


class At(Hook):
    """Does something at a step."""

    def __init__(self, step, act):
        self._step, self._act = step, act

    def on_state(self, event):
        if event.step == self._step:
            self._act()


def stop():
    """Stop the program, and return when this node is asked to."""
    lp.stop()
    lp.stop_event().wait(60)


def program_of(**nodes):
    program = lp.Program("training")
    for label, node in nodes.items():
        program.add_node(lp.PyNode(node), label=label)
    return program


def test_a_session_stops_saved_when_its_program_stops(tmp_path):
    rep, init_fn, step_fn = parts()

    def learner():
        with rep.session(
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=10**6,
            checkpoint_dir=tmp_path,
            hooks=[At(3, stop)],
            display=False,
            node=lp.context.get_context(),
        ) as session:
            for batch in session.batches():
                session.step(batch)
        return session.result.step

    with lp.launch(program_of(learner=learner), "threads") as run:
        run.wait()
    [step] = run.results_of("learner")
    assert step == 3
    went_on = rep.run(
        step_fn,
        BATCHES,
        init_fn=init_fn,
        steps=6,
        checkpoint_dir=tmp_path,
        display=False,
    )
    whole = rep.run(step_fn, BATCHES, init_fn=init_fn, steps=6, display=False)
    assert_equal_bits(went_on.state, whole.state)


def test_run_in_a_node_that_waits_for_input_stops_saved(tmp_path):
    rep, init_fn, step_fn = parts()
    may_end = threading.Event()

    def input_fn(context):
        yield from BATCHES
        lp.stop()  # the only program of this process
        may_end.wait(60)

    def learner():
        result = rep.run(
            step_fn,
            input_fn,
            init_fn=init_fn,
            steps=100,
            checkpoint_dir=tmp_path,
            display=False,
            node=lp.context.get_context(),
        )
        may_end.set()
        return result.step

    with lp.launch(program_of(learner=learner), "threads") as run:
        run.wait()
    [step] = run.results_of("learner")
    with CheckpointStore(tmp_path) as store:
        assert store.restore().step == step


def test_a_session_that_is_not_saved_just_ends_with_its_program():
    rep, init_fn, step_fn = parts()

    def learner():
        return rep.run(
            step_fn,
            BATCHES * 1000,
            init_fn=init_fn,
            steps=None,
            hooks=[At(3, stop)],
            display=False,
            node=lp.context.get_context(),
        ).step

    with lp.launch(program_of(learner=learner), "threads") as run:
        run.wait()
    assert run.results_of("learner") == [3]


def test_a_session_that_hangs_fails_its_node_and_not_the_process():
    rep, init_fn, step_fn = parts()

    def hang():
        while True:
            time.sleep(0.01)

    def learner():
        rep.run(
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=4,
            hooks=[At(2, hang)],
            step_timeout=Limits(report_s=0.5),
            display=False,
            node=lp.context.get_context(),
        )

    program = program_of(learner=learner, actor=lp.wait_for_stop)
    with (
        pytest.raises(NodeFailedError, match=r"no progress.*Failing the node"),
        lp.launch(program, "threads") as run,
    ):
        run.wait()


@pytest.mark.slow
def test_in_a_process_of_its_own_it_stops_and_fails_likewise(tmp_path):
    def learner(directory, act, limits):
        replicator.fake_devices(2)
        rep, init_fn, step_fn = parts()
        return rep.run(
            step_fn,
            BATCHES,
            init_fn=init_fn,
            steps=10**6,
            checkpoint_dir=directory,
            hooks=[At(3, act)],
            step_timeout=limits,
            display=False,
            node=lp.context.get_context(),
        ).step

    def hang():
        while True:
            time.sleep(0.01)

    program = lp.Program("training")
    program.add_node(lp.PyNode(learner, tmp_path, stop, Limits()), label="learner")
    with lp.launch(program, "processes") as run:
        run.wait()
    assert run.results_of("learner") == [3]
    program = lp.Program("training")
    limits = Limits(report_s=0.5)
    program.add_node(
        lp.PyNode(learner, tmp_path / "hangs", hang, limits), label="learner"
    )
    with (
        pytest.raises(NodeFailedError, match=r"no progress.*Failing the node"),
        lp.launch(program, "processes") as run,
    ):
        run.wait()


TAKEN_ALONG = """
import threading
import replicator
replicator.fake_devices(2)
import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.running import node_watchdog
from replicator.training.watchdog import Limits
from tests.training.test_session_in_a_node import *

node_watchdog.GRACE_S = 0.5
never = threading.Event()

def learner():
    rep, init_fn, step_fn = parts()
    rep.run(
        step_fn, BATCHES, init_fn=init_fn, steps=4, display=False,
        hooks=[At(2, never.wait)], step_timeout=Limits(report_s=0.5),
        node=lp.context.get_context(),
    )

def deaf():
    never.wait()

program = program_of(learner=learner, deaf=deaf)
with lp.launch(program, "threads", stop_grace_s=60) as run:
    run.wait()
"""


@pytest.mark.slow
def test_where_a_thread_cannot_be_ended_the_process_ends_and_says_with_whom():
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_ALONG],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == HUNG, done.stderr
    assert "the thread of `learner` waits in foreign code" in done.stderr
    assert "and with it deaf" in done.stderr


def test_what_is_no_node_is_refused():
    with pytest.raises(ArgumentError, match=r"lp\.context\.get_context"):
        replicas(1).session(init_fn=lambda key: 0.0, steps=1, node="learner")
