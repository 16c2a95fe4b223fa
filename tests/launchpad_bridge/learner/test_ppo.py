"""A learner makes PPO's epochs and minibatches of the trajectories that it gets."""

import pytest

import replicator
import replicator.launchpad_bridge as lp
from tests.ppo import ENVS, by_hand, init_params, plain, played, ppo_learner
from tests.steps import assert_close

TIMEOUT_S = 240.0


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 8])
def test_a_learner_s_ppo_is_that_of_plain_jax(n):
    rows = played(2, init_params(None))
    expected, reported = by_hand(ppo_learner, rows)
    init_fn, step_fn = ppo_learner(
        replicator.wrap_optimizer(plain()), replicator.all_reduce
    )
    program = lp.Program("ppo")
    node = lp.ReplicatedLearnerNode(
        step_fn, init_fn, steps=2, batch_size=ENVS, replicas=n, display=False
    )
    learner = program.add_node(node, label="learner")
    with lp.launch(program, "threads") as run:
        for each in rows:
            learner.dereference().insert(each, actor="me", version=0)
        run.wait(TIMEOUT_S, labels=["learner"])
    result = run.results["learner"]
    assert_close(result["variables"]["params"], expected["params"], rtol=1e-5)
    assert_close(result["metrics"]["loss"], reported["loss"], rtol=1e-4)
