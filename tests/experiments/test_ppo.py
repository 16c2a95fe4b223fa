"""PPO's step: so many updates, the same on replicas."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from experiments.ppo_cartpole import Config, make_agent, make_poles
from replicator.base.trees import named_leaves
from replicator.launchpad_bridge import acting
from tests.steps import replicas

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
SMALL = Config(environments=8, unroll_length=16, hidden=8, epochs=2, minibatches=2)


@pytest.fixture
def trajectories():
    """What an untrained agent plays."""
    agent = make_agent(SMALL)
    act = acting.LocalInference(agent.policy, seed=0, index=0)
    act.use({"params": agent.init_fn(jax.random.key(0))["params"]})
    poles = make_poles(8)
    state = acting.start(poles, agent.initial_core, seed=0)
    unrolled = acting.unroll(poles, act, state, 16)
    assert unrolled is not None
    return unrolled.trajectories


def test_all_updates_of_a_step_are_the_same_on_replicas(trajectories):
    sgd = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    agent, found = dataclasses.replace(make_agent(SMALL), optimizer=sgd), []
    for rep in (replicas(1), replicas(4)):
        state, _ = rep.compile(agent.step_fn)(rep.init(agent.init_fn), trajectories)
        found.append(jax.device_get(state["params"]))
    for one, four in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(four, one, atol=1e-6)


def test_a_step_makes_an_update_of_each_minibatch_of_each_epoch(trajectories):
    agent, rep = make_agent(SMALL), replicas(1)
    state, _ = rep.compile(agent.step_fn)(rep.init(agent.init_fn), trajectories)
    counts = [leaf for name, leaf in named_leaves(state["opt"]) if "count" in name]
    assert counts
    assert {int(count) for count in counts} == {4}
