"""Processes of a learner wait for their rows as long as somebody waits for them."""

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.learner.learner import ReplicatedLearner
from replicator.launchpad_bridge.learner.options import LearnerOptions
from replicator.launchpad_bridge.learner.shares import Saves, Shares
from replicator.training.options import RunOptions
from tests.launchpad_bridge.learner.learning import init_fn, step_fn
from tests.rpc.courier_cases import client_of, serving, wait_until


class First:
    """The first process of a learner, as its server has it."""

    def __init__(self):
        self._shares = Shares(None, 2, Saves(10, None))

    def share(self, process, number, timeout_s):
        return self._shares.share(process, number, timeout_s)


class Batches:
    """One batch of a learner, again and again."""

    def __next__(self):
        return {"x": np.arange(8)}

    def get_state(self):
        return {"batch": 0}


def test_each_process_gets_its_part_of_each_microbatch():
    shares = Shares(Batches(), 2, Saves(10, None), accumulate=2)
    assert next(shares)["x"].tolist() == [0, 1, 4, 5]
    assert shares.share(1, 0, 0.0).batch["x"].tolist() == [2, 3, 6, 7]


def test_a_wait_for_rows_ends_when_the_caller_goes():
    with serving("unix", First()) as server:
        client = client_of(server)
        client.futures.share(1, 0, 1e6)
        wait_until(lambda: server.statistics().running)
        client.close()
        wait_until(lambda: not server._service.pool.num_running)


def test_who_is_of_another_group_has_no_rows():
    options = LearnerOptions(
        step_fn=step_fn,
        batch_size=4,
        replicas=2,
        processes=2,
        variables=lambda state: state["params"],
        max_policy_lag=None,
        fixed_lag=None,
        strategy=None,
        run=RunOptions(init_fn=init_fn, steps=None),
    )
    learner = ReplicatedLearner(options, table=lp.TrajectoryQueue(8))
    assert learner.share(1, 0, 0.0) is None
    for process in (2, 1 << 40):
        with pytest.raises(ArgumentError, match="`process` must be below 2, got"):
            learner.share(process, 0, 1e6)
    with pytest.raises(ArgumentError, match="`process` must be a whole number from 1"):
        learner.share(0, 0, 0.0)
