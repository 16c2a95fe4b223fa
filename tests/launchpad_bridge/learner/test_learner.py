"""A learner learns from what actors insert, and they act with what it publishes."""

import dataclasses
import functools
import gc
import itertools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import InputOptions, options, strategies
from replicator.checkpoint.commit import list_steps
from replicator.errors import (
    CallCancelledError,
    ConnectionLostError,
    ServerStoppedError,
)
from replicator.hooks import Callback, every
from replicator.launchpad_bridge.learner.learner import ReplicatedLearner
from replicator.launchpad_bridge.learner.shares import Saves
from tests.launchpad_bridge.learner import learning
from tests.steps import assert_equal_bits
from tests.steps import replicas as replicas_of

TIMEOUT_S = 240.0
# A wait of 0.3 s fails; on a busy machine the watchdog, at 0.45 s, may be before it.
STARVES = {
    "inputs": InputOptions(timeout_s=0.3),
    "step_timeout": options.Limits(input_s=1000.0),
}
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
CUT = {"whole_below_bytes": 0}


@pytest.fixture(autouse=True)
def all_that_read_ahead_have_ended():
    """Fail a test whose learner has ended, well or not, and left its thread behind."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "replicator-input":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def program_of(
    *,
    steps=6,
    batch_size=8,
    count=2,
    turns=True,
    step_fn=learning.step_fn,
    init_fn=learning.init_fn,
    **options,
):
    program = lp.Program("impala")
    if turns:
        options = {
            "table": learning.turns(count, batch_size),
            "fixed_lag": 1,
            **options,
        }
    learner = program.add_node(
        lp.ReplicatedLearnerNode(
            step_fn,
            init_fn,
            steps=steps,
            batch_size=batch_size,
            display=False,
            **options,
        ),
        label="learner",
    )
    learning.actors(program, learner, count=count, turns=turns)
    return program


class Leaves(lp.TrajectoryQueue):
    """A queue that is done when it is told so."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self._left = threading.Event()

    def leave(self):
        self._left.set()

    def run(self):
        self._left.wait()


def learner_node(**options):
    options = {"batch_size": 2, "replicas": 1, "display": False, **options}
    return lp.ReplicatedLearnerNode(learning.step_fn, learning.init_fn, **options)


def learnt(**options):
    with lp.launch(program_of(**options), "threads") as run:
        run.wait(TIMEOUT_S, labels=["learner"])
        return run.results["learner"]


def test_it_makes_its_updates_from_what_actors_insert():
    result = learnt(turns=False, replicas=2)
    assert result["step"] == 6
    assert np.isfinite(result["metrics"]["loss"])


@pytest.mark.slow
def test_states_and_variables_are_freed_with_the_program_and_no_collector_comes():
    def init_fn(key):
        return learning.init_fn(key) | {"large": jnp.zeros(5_000)}

    def step_fn(state, rows):
        after, metrics = learning.step_fn(state, rows)
        return {**after, "large": state["large"] + 1}, metrics

    def left():
        return [array for array in jax.live_arrays() if array.size >= 5_000]

    gc.collect()
    gc.disable()
    try:
        before = len(left())
        agent = {"step_fn": step_fn, "init_fn": init_fn, "turns": False}
        learnt(**agent, steps=2, variables=lambda state: dict(state, opt=()))
        assert len(left()) <= before
    finally:
        gc.enable()


def test_actors_that_take_turns_give_the_same_bits_each_time():
    one, other = learnt(replicas=2), learnt(replicas=2)
    assert_equal_bits(one["variables"], other["variables"])
    assert one["metrics"]["policy_lag"] == 1.0


@pytest.mark.parametrize("replicas", [1, 4])
def test_any_number_of_replicas_learns_the_same_from_the_same_trajectories(replicas):
    one, other = learnt(replicas=2), learnt(replicas=replicas)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, one["variables"], other["variables"])


def test_a_learner_that_goes_on_ends_with_the_bits_of_one_that_did_not_stop(tmp_path):
    whole = learnt(replicas=2, steps=7)
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "replicas": 2}
    learnt(steps=4, **saved)
    assert_equal_bits(whole["variables"], learnt(steps=7, **saved)["variables"])


def test_a_stopped_program_leaves_its_learner_saved(tmp_path):
    program = program_of(turns=False, steps=None, checkpoint_dir=tmp_path)
    with lp.launch(program, "threads") as run:
        client = program.groups["learner"][0].create_handle().dereference()
        while client.get_variables().version < 3:
            pass
    assert list_steps(tmp_path)[-1] == run.results["learner"]["step"] >= 3


@pytest.mark.parametrize("each", [1, 4])
def test_somebody_may_ask_for_a_checkpoint(tmp_path, each):
    options = {"steps_per_call": each, "checkpoint_dir": tmp_path}
    program = program_of(turns=False, steps=None, **options)
    with lp.launch(program, "threads"):
        client = program.groups["learner"][0].create_handle().dereference()
        assert client.save() in list_steps(tmp_path)


def test_save_without_a_directory_is_refused():
    program = program_of(turns=False, steps=None)
    with lp.launch(program, "threads"):
        client = program.groups["learner"][0].create_handle().dereference()
        with pytest.raises(ValueError, match="checkpoint_dir"):
            client.save()


def test_trajectories_of_too_old_a_policy_are_dropped_and_counted():
    program = lp.Program("lagging")
    node = lp.ReplicatedLearnerNode(
        learning.step_fn,
        learning.init_fn,
        steps=3,
        batch_size=2,
        max_policy_lag=1,
        replicas=1,
        display=False,
    )
    learner = program.add_node(node, label="learner")
    rows = learning.rows(2)
    with lp.launch(program, "threads") as run:
        client = learner.dereference()
        for version, newest in ((0, 0), (0, 1), (0, 2), (2, 2)):
            client.get_variables(version=newest)
            client.insert(rows, actor="by hand", version=version)
        run.wait(TIMEOUT_S, labels=["learner"])
    assert run.results["learner"]["metrics"]["policy_lag_max"] == 0


def own_builder(variables, devices):
    rules = [strategies.Rule(pattern="*/w", stored="shard")]
    return strategies.Rules(rules, shard=len(devices), **CUT)


# Of two columns over four devices.
PADDED = strategies.Rules(
    [strategies.Rule(pattern="*/w", stored=(None, "shard"), uneven="pad")], shard=None
)


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [
        (strategies.fsdp(**CUT), 2),
        pytest.param(own_builder, 2, marks=pytest.mark.slow),
        pytest.param(PADDED, 4, marks=pytest.mark.slow),
    ],
)
def test_under_a_strategy_it_learns_the_same_and_actors_get_variables_whole(
    strategy, replicas
):
    program = lp.Program("partitioned")
    node = lp.ReplicatedLearnerNode(
        learning.step_fn,
        learning.init_fn,
        steps=2,
        batch_size=4,
        replicas=replicas,
        strategy=strategy,
        display=False,
    )
    learner, rows = program.add_node(node, label="learner"), learning.rows(4)
    with lp.launch(program, "threads") as run:
        client = learner.dereference()
        params = client.get_variables(version=0).values["params"]
        state = {"params": params, "opt": learning.optimizer.init(params)}
        for version in range(2):
            client.get_variables(version=version)
            client.insert(rows, actor="by hand", version=version)
            state, _ = learning.step_fn(state, rows)
        run.wait(TIMEOUT_S, labels=["learner"])
    found = run.results["learner"]["variables"]["params"]["w"]
    np.testing.assert_allclose(found, state["params"]["w"], rtol=1e-5)


def test_it_tells_how_episodes_ended():
    program = program_of(turns=False, steps=None)
    with lp.launch(program, "threads"):
        client = program.groups["learner"][0].create_handle().dereference()
        while not (told := client.statistics())["episodes"]:
            pass
    assert told["episode_return"] >= 0
    assert told["table"]["taken"] > 0


def test_what_actors_play_is_told_in_hooks_records_and_the_result(tmp_path):
    seen = []
    watch = Callback(lambda event: seen.append(event.metrics), every(n_steps=1))
    result = learnt(
        replicas=1, steps=8, hooks=[watch], directory=tmp_path, write_every=1
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    numbers = [each for each in records if "environment_steps" in each]
    for told in (seen[-1], result["metrics"], numbers[-1], result["statistics"]):
        assert told["episodes"] > 0
        assert told["episode_length"] >= 2
        assert told["episode_return"] >= 0
    steps = [int(each["environment_steps"]) for each in seen]
    # Eight trajectories of four steps an update, resets apart.
    assert all(16 < b - a <= 32 for a, b in itertools.pairwise([0, *steps]))
    assert numbers[-1]["dropped/begun"] == 0


@pytest.mark.slow
def test_a_run_follows_the_returns_of_its_actors(tmp_path):
    follow = options.Follow(metric="episode_return", goal="max")
    seen = []
    watch = Callback(lambda event: seen.append(event.metrics), every(n_steps=1))
    result = learnt(
        replicas=2,
        steps=8,
        eval_every=2,
        follow=follow,
        hooks=[watch],
        directory=tmp_path,
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line).get("eval/episode_return") for line in lines]
    told = [each["episode_return"] for each in seen[1::2]]
    np.testing.assert_allclose([each for each in found if each is not None], told)
    assert result["metrics"]["episode_return"] == told[-1]


@pytest.mark.slow
def test_what_was_played_goes_on_with_a_learner_that_does(tmp_path):
    whole = learnt(replicas=1, steps=7)
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "replicas": 1}
    learnt(steps=4, **saved)
    names = ("episodes", "environment_steps", "episode_return", "episode_length")
    again = learnt(steps=7, **saved)["metrics"]
    assert [again[n] for n in names] == [whole["metrics"][n] for n in names]


@pytest.mark.parametrize("turns", [SLOW(False), True])
def test_a_step_may_take_a_key(turns):
    def step_fn(state, rows, key):
        state, metrics = learning.step_fn(state, rows)
        return state, {**metrics, "drawn": jax.random.uniform(key)}

    drawn = learnt(replicas=2, steps=3, turns=turns, step_fn=step_fn)["metrics"]
    plain = replicas_of(1).run(
        lambda state, batch, key: (state, {"drawn": jax.random.uniform(key)}),
        [np.ones(2, np.float32)],
        init_fn=lambda key: jnp.zeros(()),
        steps=3,
        display=False,
    )
    assert drawn["drawn"] == plain.metrics["drawn"]


@pytest.mark.parametrize("own_table", [SLOW(False), True])
def test_who_waits_for_a_program_waits_for_its_learners(own_table):
    program, learners = lp.Program("two"), []
    for name in ("a", "b"):
        table = None
        if own_table:
            node = lp.CourierNode(lp.TrajectoryQueue, capacity=32)
            table = program.add_node(node, label=f"table_{name}")
        node = learner_node(steps=3, table=table)
        learners.append(program.add_node(node, label=name))
        learning.actors(
            program, learners[-1], count=1, table=table, label=f"actor_{name}"
        )
    run = lp.launch(program, "threads")
    run.wait(TIMEOUT_S)
    assert run.is_over
    assert [run.results[name]["step"] for name in ("a", "b")] == [3, 3]
    assert run.results["actor_a"]["trajectories"] > 0


def test_a_program_whose_learner_has_no_end_is_waited_for():
    program = program_of(turns=False, steps=None)
    with lp.launch(program, "threads") as run, pytest.raises(lp.RunTimeoutError):
        run.wait(0.2)


@pytest.mark.parametrize("is_made_before", [SLOW(False), True])
def test_nobody_waits_for_a_learner_that_is_done(is_made_before):
    program = program_of(turns=False, steps=1)
    handle = program.groups["learner"][0].create_handle()
    with lp.launch(program, "threads") as run:
        before = handle.dereference()
        run.wait(TIMEOUT_S, labels=["learner"])
        client = before if is_made_before else handle.dereference()
        # Closed, where the learner was the only node that had started by then.
        gone = (ConnectionLostError, ServerStoppedError, CallCancelledError)
        with pytest.raises(gone):
            client.call("statistics", timeout_s=TIMEOUT_S)


def test_a_learner_whose_table_is_gone_tells_what_it_knows():
    program = lp.Program("gone")
    table = program.add_node(lp.CourierNode(Leaves, capacity=8), label="table")
    node = learner_node(steps=None, table=table)
    learner = program.add_node(node, label="learner")
    with lp.launch(program, "threads") as run:
        client = table.dereference()
        client.insert(learning.rows(2), actor="by hand", version=0)
        asking = learner.dereference()
        while asking.statistics()["version"] != 1:
            pass
        client.leave()
        run.wait(TIMEOUT_S, labels=["table"])
        told = asking.call("statistics", timeout_s=TIMEOUT_S)
    assert told["table"]["taken"] == 2


def test_nobody_runs_a_learner_again():
    program = program_of(turns=False, steps=None)
    with lp.launch(program, "threads"):
        client = program.groups["learner"][0].create_handle().dereference()
        client.get_variables()
        with pytest.raises(AttributeError, match="no method `run`"):
            client.run()


def test_an_evaluation_sees_the_user_s_state_where_actors_take_turns():
    def eval_fn(state, rows):
        return {"size": rows["x"] * jnp.square(state["params"]["w"]).sum()}

    found = learnt(
        replicas=1,
        steps=2,
        eval_fn=eval_fn,
        eval_dataset=[{"x": np.ones(4, np.float32)}],
        eval_every=1,
    )
    assert found["step"] == 2


@pytest.mark.parametrize("name", ["policy_lag", None])
def test_metrics_that_are_none_are_refused(name):
    def step_fn(state, rows):
        state, metrics = learning.step_fn(state, rows)
        return state, {name: metrics["loss"]} if name else metrics["loss"]

    program = lp.Program("unnamed")
    node = lp.ReplicatedLearnerNode(
        step_fn, learning.init_fn, steps=1, batch_size=2, replicas=1, display=False
    )
    learner = program.add_node(node, label="learner")
    run = lp.launch(program, "threads")
    learner.dereference().insert(learning.rows(2), actor="me", version=0)
    with pytest.raises(lp.NodeFailedError, match="must return a dict of metrics"):
        run.wait(TIMEOUT_S)


def test_a_state_without_params_needs_variables():
    node = lp.ReplicatedLearnerNode(
        lambda state, rows: (state, {}),
        lambda key: {"weights": jnp.zeros(2)},
        steps=1,
        batch_size=2,
        display=False,
    )
    program = lp.Program("unnamed")
    program.add_node(node, label="learner")
    message = r"`variables` must be given .* got none for \['weights'\]"
    with pytest.raises(lp.NodeFailedError, match=message):
        lp.launch(program, "threads").wait(TIMEOUT_S)


def test_a_dataset_to_evaluate_without_a_function_is_not_left_out_unsaid():
    said = {**STARVES, "eval_dataset": [np.zeros(1)]}
    node = learner_node(steps=1, eval_every=1, **said)
    program = lp.Program("forgotten")
    program.add_node(node, label="learner")
    with pytest.raises(lp.NodeFailedError, match="got no `eval_fn`"):
        lp.launch(program, "threads").wait(TIMEOUT_S)


class NoShares:
    def share(self, process, number, timeout_s):
        time.sleep(0.01)


@pytest.mark.slow
def test_another_process_of_a_learner_that_starves_speaks_of_actors_too():
    def work():
        return ReplicatedLearner(of, first=NoShares(), process=1).run()

    of, *_ = learner_node(steps=1, **STARVES, replicas=None)._first._args
    of = dataclasses.replace(of, processes=2)
    program = lp.make_program(lp.PyNode(work))
    with pytest.raises(
        lp.NodeFailedError, match=r"Actors must insert 2 traj.* in time"
    ):
        lp.launch(program, "threads").wait(TIMEOUT_S)


def test_a_learner_that_starves_speaks_of_actors():
    node = learner_node(steps=1, **STARVES)
    program = lp.Program("starved")
    program.add_node(node, label="learner")
    message = r"Actors must insert 2 trajectories .* counts {.*'waiting': 0"
    with pytest.raises(lp.NodeFailedError, match=message):
        lp.launch(program, "threads").wait(TIMEOUT_S)


def test_schedules_of_two_processes_are_told_alike():
    one, other = Saves(2, None), Saves(2, None)
    one.asked.set()
    other.behind.add(3)
    assert repr(one) == repr(other)
