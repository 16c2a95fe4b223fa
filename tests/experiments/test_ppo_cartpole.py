"""PPO by the parts that run IMPALA: the same on replicas, and it learns."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import replicator
from experiments import run_folder
from experiments.ppo_cartpole import (
    SCALES,
    Config,
    check,
    make_agent,
    make_poles,
    run_process,
)
from replicator.base.trees import named_leaves
from replicator.errors import ArgumentError
from replicator.launchpad_bridge import acting
from tests.steps import replicas

ROOT = Path(__file__).parents[2]
SMALL = Config(
    environments=8,
    unroll_length=16,
    hidden=8,
    steps=2,
    epochs=2,
    minibatches=2,
    directory="",
)


@pytest.fixture(autouse=True)
def _promotion():
    # Of optax's Adam; in all threads, as nodes may be threads.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def trajectories(agent):
    """Return what an untrained agent plays."""
    act = acting.LocalInference(agent.policy, seed=0, index=0)
    act.use({"params": agent.init_fn(jax.random.key(0))["params"]})
    poles = make_poles(8)
    state = acting.start(poles, agent.initial_core, seed=0)
    unrolled = acting.unroll(poles, act, state, 16)
    assert unrolled is not None
    return unrolled.trajectories


@pytest.mark.slow
def test_all_updates_of_a_step_are_the_same_on_replicas():
    sgd = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    agent = dataclasses.replace(make_agent(SMALL), optimizer=sgd)
    played, found = trajectories(agent), []
    for rep in (replicas(1), replicas(4)):
        state, _ = rep.compile(agent.step_fn)(rep.init(agent.init_fn), played)
        found.append(jax.device_get(state["params"]))
    for one, four in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(four, one, atol=1e-6)


@pytest.mark.slow
def test_a_step_makes_an_update_of_each_minibatch_of_each_epoch():
    agent, rep = make_agent(SMALL), replicas(1)
    state, _ = rep.compile(agent.step_fn)(rep.init(agent.init_fn), trajectories(agent))
    counts = [leaf for name, leaf in named_leaves(state["opt"]) if "count" in name]
    assert counts
    assert {int(count) for count in counts} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_a_seed_goes_on_from_where_it_was_killed(scale, tmp_path):
    config = dataclasses.replace(SMALL, directory=str(tmp_path))
    first = SCALES[scale](replicator.Replicator(1), config, 0)
    more = dataclasses.replace(config, steps=3)
    found = SCALES[scale](replicator.Replicator(1), more, 0)
    assert found.returns[: len(first.returns)] == first.returns
    assert run_folder.last_saved(tmp_path / "seed-0") == 3


@pytest.mark.slow
def test_the_same_seed_plays_and_learns_the_same():
    first, second = (run_process(replicator.Replicator(1), SMALL, 3) for _ in range(2))
    assert first.returns == second.returns
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, second.params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unroll_length": 15}, "`--unroll_length` must divide evenly over 2 minib"),
        ({"environments": 6}, "`--environments` must divide evenly over 4 replicas"),
        (
            {"actors": 3, "scale": "program"},
            "`--environments` must divide evenly over 3 actors",
        ),
    ],
)
def test_flags_that_do_not_fit_each_other_are_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        check(dataclasses.replace(SMALL, **change), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--seeds=1"],
        pytest.param(
            ["--seeds=1", "--scale=program", "--launch_type=processes"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["process", "program"],
)
def test_the_pole_stands(flags, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.ppo_cartpole"),
            *(*flags, f"--directory={tmp_path}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["average_return"] >= 475
    assert found["seconds"] <= 300
    assert [path.name for path in tmp_path.iterdir()] == ["learning_curve.png"]
