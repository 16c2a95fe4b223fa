"""A learner that went back, and the queue that was filled while it was away."""

import os
import signal

import jax
import pytest

import replicator.launchpad_bridge as lp
from replicator import InputOptions
from replicator.hooks import Hook
from tests.launchpad_bridge.learner import learning
from tests.multiprocess import group_nodes
from tests.multiprocess.test_learner_groups import TIMEOUT_S

pytestmark = pytest.mark.slow


class DieLate(Hook):
    """Kills one process of a learner once; by then its first rows are long used up."""

    def __init__(self, rank):
        self._rank = rank

    def on_state(self, event):
        is_first = lp.context.get_context().attempt == 0
        if event.step == 20 and is_first and jax.process_index() == self._rank:
            os.kill(os.getpid(), signal.SIGKILL)


class NoNegativeLag(Hook):
    """Fails at an update from trajectories of a version that the learner has not."""

    def on_metrics(self, event):
        lags = jax.device_get(event.metrics["policy_lag_histogram"])
        assert event.metrics["policy_lag"] >= 0
        assert lags.sum() == 8


@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_acted_with_variables_that_were_lost_is_not_learnt_from(processes):
    program = lp.Program("goes-back")
    queue = program.add_node(lp.CourierNode(lp.TrajectoryQueue, 10), label="queue")
    node = lp.ReplicatedLearnerNode(
        *(learning.step_fn, learning.init_fn),
        steps=24,
        batch_size=8,
        processes=processes,
        table=queue,
        # Small, and read late: so at the kill the queue has versions from 10 on. And
        # there is no checkpoint, so the learner begins anew.
        inputs=InputOptions(remainder="refuse", prefetch=1),
        hooks=[DieLate(processes - 1), NoNegativeLag()],
        display=False,
    )
    restart = lp.Restart(attempts=1, backoff_s=0.1)
    with program.group("learner", resources=group_nodes.CPU, restart=restart):
        learner = program.add_node(node)
    learning.actors(program, learner, count=2, table=queue)
    with lp.launch(program, "processes") as run:
        run.wait(TIMEOUT_S, labels=["learner"])
    assert run.results_of("learner")[0]["step"] == 24
