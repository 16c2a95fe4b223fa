"""What a learner's node refuses, and what it looks like in a program."""

import inspect
import subprocess
import sys

import pytest

import replicator
import replicator.launchpad_bridge as lp
from replicator import InputOptions, options, strategies
from replicator.errors import ArgumentError
from tests.launchpad_bridge.learner import learning


def node(**options):
    said = {"steps": 1, "batch_size": 8, **options}
    return lp.ReplicatedLearnerNode(learning.step_fn, learning.init_fn, **said)


FSDP = strategies.fsdp()
REFUSED = [
    ({"batch_size": 0}, "`batch_size` must be"),
    ({"steps": 0}, "`steps` must be"),
    ({"steps": "5"}, "`steps` must be"),
    ({"processes": 0}, "`processes` must be"),
    ({"replicas": 0}, "`replicas` must be"),
    ({"replicas": "2"}, "`replicas` must be"),
    ({"replicas": 3}, "divide evenly over 3 replicas, got 8. Use 6"),
    ({"replicas": 1, "processes": 2}, "evenly over 2 processes, got 1. Use 2"),
    ({"processes": 3}, "divide evenly over 3 processes, got 8. Use 6"),
    ({"accumulate": 3}, "divide evenly over 3 microbatches of all replicas"),
    ({"max_policy_lag": -1}, "`max_policy_lag` must be"),
    ({"on_mismatch": "rollback"}, "`on_mismatch` must be left out"),
    ({"max_policy_lag": True}, "`max_policy_lag` must be"),
    ({"fixed_lag": 1.5}, "`fixed_lag` must be"),
    ({"max_policy_lag": 1, "fixed_lag": 1}, "got both it and `fixed_lag`"),
    ({"variables": 3}, "`variables` must be a function"),
    ({"table": 3}, "`table` must be a handle of a node, or a `Deferred`, got 3"),
    ({"inputs": 3}, "`inputs` must be"),
    ({"inputs": InputOptions(mode="per_replica")}, "`inputs.mode` must be left out"),
    ({"on_nonfinite": "rollback"}, "`on_nonfinite` must be left out"),
    ({"spikes": options.Spikes(action="rollback")}, "`on_nonfinite` must be left out"),
    ({"on_nonfinite": "skip", "fixed_lag": 1}, 'Use "raise" with `fixed_lag`'),
    ({"strategy": "fsdp"}, "`strategy` must be a `Strategy`"),
    (
        {"strategy": FSDP, "replicas": 8, "batch_size": 6},
        "`batch_size` must divide evenly over 8 devices, got 6. Use 8",
    ),
    (
        {"strategy": FSDP, "replicas": 8, "accumulate": 2},
        "evenly over 16 microbatches of all devices, got 8. Use 16",
    ),
    (
        {"strategy": strategies.hybrid(shard=4), "replicas": 2},
        "`strategy` must fit 2 devices",
    ),
    ({"strategy": FSDP, "processes": 2}, "`processes` must be left out .* got 2"),
    ({"strategy": FSDP, "fixed_lag": 0}, "`fixed_lag` must be left out .* got 0"),
    ({"steps_per_call": 2, "fixed_lag": 1}, "`steps_per_call` must be left out"),
    ({"steps_per_call": 3, "max_policy_lag": 1}, "a `max_policy_lag` of 2 or more"),
    ({"samples_per_call": 0}, "`samples_per_call` must be"),
    ({"samples_per_call": 2, "fixed_lag": 1}, "`samples_per_call` must be left out"),
    ({"samples_per_call": 3, "max_policy_lag": 1}, "a `max_policy_lag` of 2 or more"),
    ({"priorities": 3}, "`priorities` must be a `str`, got 3"),
    ({"priorities": "p"}, "table that has no `update_priorities`, got 'p' and a Traj"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused_where_it_is_written(given, message):
    with pytest.raises(ArgumentError, match=message):
        node(**given)


# It would wait for a batch before actors have anything to act with.
NOT_ITS = ["checkpoint_directory", "dataset", "auto_microbatch", "memory_limit_bytes"]


@pytest.mark.parametrize("name", NOT_ITS)
def test_what_it_does_not_take_is_refused_by_name(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        node(**{name: 1})


def test_its_options_of_a_run_have_the_types_and_defaults_of_run():
    def parameters(function):
        return dict(inspect.signature(function).parameters)

    of_run = parameters(replicator.Replicator.run)
    of_node = parameters(lp.ReplicatedLearnerNode)
    # A learner has no dataset that ends: its number of steps is a choice.
    apart = {"step_fn", "init_fn", "checkpoint_every", "steps"}
    for name in (of_run.keys() & of_node.keys()) - apart:
        assert str(of_node[name]) == str(of_run[name])
    left_out = {
        "dataset",
        "init_state",
        "auto_microbatch",
        "memory_limit_bytes",
        "memory_copy_every",  # in the memory of `replicator launch`
        "node",
    }
    assert of_run.keys() - of_node.keys() - {"self"} == left_out


def test_a_batch_that_is_whole_on_each_device_need_not_divide():
    split = strategies.tensor_parallel({"*": ("model",)})
    node(strategy=split, replicas=8, batch_size=6)


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
