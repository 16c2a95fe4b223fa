import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import replicator
from experiments import run_folder
from experiments.impala_catch import (
    SCALES,
    Config,
    anakin,
    make_agent,
    run_process,
    run_program,
    watch,
)
from replicator.testing import assert_replica_invariant

ROOT = Path(__file__).parents[2]
SLOW = ("anakin", "program")
SMALL = Config(environments=16, unroll_length=12, hidden=8, steps=3, directory="")


@pytest.fixture(autouse=True)
def _promotion():
    # Of optax's Adam; in all threads, as nodes may be threads.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_acting_and_learning_in_turn_finishes_episodes():
    found = run_process(replicator.Replicator(2), SMALL, seed=0)
    # The first reset, then ten steps an episode: nine, and one that begins anew.
    assert len(found.returns) == 3 * 16
    assert {gained for _, gained in found.returns} == {-1.0, 1.0}


@pytest.mark.slow
def test_the_same_seed_plays_and_learns_the_same():
    first, second = (run_process(replicator.Replicator(1), SMALL, 3) for _ in range(2))
    assert first.returns == second.returns
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, second.params))


@pytest.mark.parametrize(
    "scale", ["process", *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)]
)
def test_a_seed_goes_on_from_where_it_was_killed(scale, tmp_path):
    config = dataclasses.replace(SMALL, directory=str(tmp_path))
    first = SCALES[scale](replicator.Replicator(2), config, 0)
    config = dataclasses.replace(config, steps=5)
    found = SCALES[scale](replicator.Replicator(2), config, 0)
    assert found.returns[: len(first.returns)] == first.returns
    assert max(update for update, _ in first.returns) <= 3
    assert len(found.returns) > len(first.returns)
    assert run_folder.last_saved(tmp_path / "seed-0") == 5


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 8])
def test_anakin_is_the_same_on_any_number_of_replicas(replicas):
    def ran(replicas):
        rep = replicator.Replicator(replicas)
        init_fn, step_fn = anakin(make_agent(SMALL), SMALL, replicas)
        boards = {"board": np.arange(16, dtype=np.int32)}
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
    agent = make_agent(dataclasses.replace(SMALL, steps=100, lstm=4))
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


@pytest.mark.slow
def test_a_program_finishes_episodes_and_learns():
    found = run_program(replicator.Replicator(1), SMALL, seed=0)
    assert {gained for _, gained in found.returns} <= {-1.0, 1.0}
    assert len(found.returns) >= 16
    new = make_agent(SMALL).init_fn(jax.random.key(0))["params"]
    assert jax.tree.structure(found.params) == jax.tree.structure(new)


def test_an_episode_is_shown_from_its_first_picture_to_its_last():
    params = make_agent(SMALL).init_fn(jax.random.key(0))["params"]
    frames, gained = zip(*watch(SMALL, params, 0), strict=True)
    assert [int(frame[:9].sum()) for frame in frames] == [1] * 9 + [0]
    assert abs(gained[-1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--scale=process"],
        ["--scale=anakin"],
        # Threads share one lock of Python: a minute and a half.
        pytest.param(["--scale=program"], marks=pytest.mark.nightly),
        pytest.param(
            ["--scale=program", "--launch_type=processes"], marks=pytest.mark.nightly
        ),
        pytest.param(["--scale=program", "--launch_type=ray"], id="ray"),
    ],
)
def test_catch_is_learned_in_two_minutes(flags, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.impala_catch"),
            *("--seeds=2", *flags, f"--directory={tmp_path}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["average_return"] >= 0.95
    assert found["seconds"] <= 120
    pictures = {path.name for path in tmp_path.iterdir()}
    assert pictures == {"learning_curve.png", "episode.png"}
