"""A learner learns from what actors insert, and they act with what it publishes."""

import numpy as np

import replicator.launchpad_bridge as lp
from tests.launchpad_bridge.learner import learning
from tests.steps import assert_equal_bits

TIMEOUT_S = 60.0


def program_of(*, steps=6, batch_size=8, count=2, turns=True, **options):
    program = lp.Program("impala")
    if turns:
        options = {
            "table": learning.turns(count, batch_size),
            "fixed_lag": 1,
            **options,
        }
    learner = program.add_node(
        lp.ReplicatedLearnerNode(
            learning.step_fn,
            learning.init_fn,
            steps=steps,
            batch_size=batch_size,
            display=False,
            **options,
        ),
        label="learner",
    )
    learning.actors(program, learner, count=count, turns=turns)
    return program


def learnt(**options):
    with lp.launch(program_of(**options), "threads") as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        return run.results["learner"]


def test_it_makes_its_updates_from_what_actors_insert():
    result = learnt(turns=False, replicas=2)
    assert result["step"] == 6
    assert np.isfinite(result["metrics"]["loss"])


def test_actors_that_take_turns_give_the_same_bits_each_time():
    one, other = learnt(replicas=2), learnt(replicas=2)
    assert_equal_bits(one["variables"], other["variables"])
    assert one["metrics"]["policy_lag"] == 1.0
