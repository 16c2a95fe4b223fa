"""What a learner's node refuses, and what it looks like in a program."""

import subprocess
import sys

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError, ProgramError
from tests.launchpad_bridge.learner import learning


def node(**options):
    said = {"steps": 1, "batch_size": 8, **options}
    return lp.ReplicatedLearnerNode(learning.step_fn, learning.init_fn, **said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"processes": 0}, "`processes` must be"),
        ({"replicas": 3}, "divide evenly over 3 replicas, got 8. Use 6"),
        ({"processes": 3}, "divide evenly over 3 processes, got 8. Use 6"),
        ({"max_policy_lag": -1}, "`max_policy_lag` must be a whole number from 0"),
        ({"fixed_lag": 1.5}, "`fixed_lag` must be a whole number from 0"),
        ({"checkpoint_directory": "x"}, "got `checkpoint_directory`. It takes"),
        ({"dataset": []}, "got `dataset`. It takes"),
        ({"variables": 3}, "`variables` must be a function"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_written(options, message):
    with pytest.raises(ArgumentError, match=message):
        node(**options)


def test_a_lag_is_bounded_or_fixed():
    with pytest.raises(ProgramError, match="Leave one out"):
        node(max_policy_lag=1, fixed_lag=1)


@pytest.mark.parametrize(
    ("processes", "workers"),
    [(1, ["learner", "actor"]), (2, ["learner/0", "learner/1", "actor"])],
)
def test_the_picture_shows_each_process_and_who_calls_the_first(processes, workers):
    program = lp.Program("impala")
    learner = program.add_node(node(processes=processes), label="learner")
    learning.actors(program, learner, count=1)
    picture = program.to_mermaid()
    assert all(f'"{worker}' in picture for worker in workers), picture


def test_names_that_are_not_published_are_refused():
    program = lp.Program("impala")
    learner = program.add_node(node(steps=None, display=False), label="learner")
    with (
        lp.launch(program, "threads"),
        pytest.raises(LookupError, match="published are 'params'"),
    ):
        learner.dereference().get_variables(["policy"])


def test_a_program_without_a_learner_does_not_wait_for_the_replicator():
    program = (
        "import sys, replicator.launchpad_bridge as lp\n"
        "assert 'replicator.replicator' not in sys.modules\n"
        "lp.ReplicatedLearnerNode\n"
        "assert 'replicator.replicator' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
