"""Catch, at all scales; `test_seeds` has what holds of any agent."""

import dataclasses

import jax
import numpy as np
import pytest

import replicator
from experiments.impala_catch import anakin_step, make_agent, run_process, watch
from replicator.testing import assert_replica_invariant
from tests.experiments.test_seeds import CATCH

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_acting_and_learning_in_turn_finishes_episodes():
    found = run_process(replicator.Replicator(2), CATCH, seed=0)
    # The first reset, then ten steps an episode: nine, and one that begins anew.
    assert len(found.returns) == 3 * 16
    assert {gained for _, gained in found.returns} == {-1.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 8])
def test_anakin_is_the_same_on_any_number_of_replicas(replicas):
    def ran(replicas):
        rep = replicator.Replicator(replicas)
        init_fn, step_fn = anakin_step(make_agent(CATCH), CATCH, replicas)
        boards = np.arange(16, dtype=np.int32)
        with rep.session(step_fn, init_fn=init_fn, steps=3, display=False) as session:
            metrics = [session.step(boards) for _ in session.steps()]
        gained = [np.asarray(each["gained"]).reshape(16, -1) for each in metrics]
        return gained, session.result.state["params"]

    (one, params), (many, other) = ran(1), ran(replicas)
    np.testing.assert_array_equal(one, many)  # the same boards, the same actions
    for found, expected in zip(
        jax.tree.leaves(other), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-3)  # Adam, of gradients ~0


@pytest.mark.slow
def test_what_is_learned_from_trajectories_does_not_depend_on_replicas():
    agent = make_agent(dataclasses.replace(CATCH, steps=100, lstm=4))
    rng = np.random.default_rng(0)
    last = rng.random((16, 7)) < 0.2
    trajectories = {
        "observation": rng.random((16, 7, 10, 5), np.float32),
        "first": np.roll(last, 1, axis=1),
        "last": last,
        "action": rng.integers(3, size=(16, 6), dtype=np.int32),
        "reward": rng.normal(size=(16, 6)).astype(np.float32),
        "discount": np.float32(1 - last[:, 1:]),
        "extras": {"logits": rng.normal(size=(16, 6, 3)).astype(np.float32)},
        "core": agent.initial_core(16),
    }
    assert_replica_invariant(
        agent.step_fn, agent.init_fn, trajectories, accumulate=(1,), at_steps=(0, 1)
    )


def test_an_episode_is_shown_from_its_first_picture_to_its_last():
    params = make_agent(CATCH).init_fn(jax.random.key(0))["params"]
    frames, gained = zip(*watch(CATCH, params, 0), strict=True)
    assert [int(frame[:9].sum()) for frame in frames] == [1] * 9 + [0]
    assert abs(gained[-1]) == 1
