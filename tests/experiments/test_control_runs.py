"""Continuous control: flags that do not fit each other, and runs end to end."""

import json

import jax
import numpy as np
import pytest

import replicator
from experiments import control_runs, d4pg_control, sac_control
from experiments.environments import pendulum
from experiments.returns import Learned
from replicator.errors import ArgumentError
from tests.experiments.command import command

pytestmark = pytest.mark.usefixtures("standard_promotion")
ANAKIN = {"env": "pendulum", "scale": "anakin"}
SMALL = ANAKIN | {
    "environments": 8,
    "unroll_length": 50,  # an episode is four calls of two updates
    "steps_per_call": 2,
    "batch_size": 8,
    "capacity": 800,
    "warmup": 10,
    "hidden": 8,
    "steps": 8,
}
AGENTS = pytest.mark.parametrize("module", [d4pg_control, sac_control])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"least": 10},
            "`--least` must come with `--scale=process`, got 10 with anakin. Leave it",
        ),
        ({"n": 5}, "`--n` must come with `--scale=process`, got 5"),
        ({"exponent": 0.0}, "`--exponent` must come with"),
        ({"importance": 0.0}, "`--importance` must come with"),
        ({"actors": 4}, "`--actors` must come with `--scale=program`, got 4"),
        ({"env": "HalfCheetah-v5"}, "`--env` must be pendulum with `--scale=anakin`"),
        (
            {"capacity": 8},
            "`--capacity` must be at least 32, the transitions of a turn",
        ),
    ],
)
def test_flags_that_anakin_has_no_use_for_are_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        control_runs.check(d4pg_control.Config(**ANAKIN | change), 4)


@AGENTS
def test_an_agent_runs_as_anakin_with_the_flags_of_its_own(module):
    control_runs.check(module.Config(**ANAKIN), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "`--capacity` must be at least 8192, a sample of 32 batches, got 1000"),
        ({"scale": "program"}, "at least 2048, a sample of 8 batches, got 1000"),
        (
            {"batch_size": 8},
            "at least 2000, that of `--least`, got 1000. Use 8000",
        ),
        (
            {"environments": 400, "batch_size": 8},
            "at least 4000, the transitions of an unroll, got 1000",
        ),
        (
            {"environments": 800, "scale": "program"},
            "at least 4000, the transitions of an unroll, got 1000",
        ),
    ],
)
def test_a_table_that_cannot_hold_a_sample_or_an_insert_is_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        control_runs.check(d4pg_control.Config(capacity=1_000, **change), 4)


def test_flags_of_a_program_are_for_programs():
    with pytest.raises(ArgumentError, match="`--launch_type` must come with `--scale="):
        control_runs.check(d4pg_control.Config(launch_type="ray"), 4)


def test_a_discount_that_bounds_no_returns_is_refused_by_d4pg():
    message = r"`--discount` must be below 1, as it bounds returns, got 1\.0\. Use 0.99"
    with pytest.raises(ArgumentError, match=message):
        d4pg_control.make_agent(d4pg_control.Config(**ANAKIN, discount=1.0))


def run_anakin(module, **changes):
    config = module.Config(**SMALL | changes)
    rep, agent = replicator.Replicator(), module.make_agent(config)
    return control_runs.run_anakin(rep, config, agent, 0)


@pytest.mark.slow
@AGENTS
def test_a_run_on_the_devices_goes_on_with_its_memory_and_episodes(module, tmp_path):
    first = run_anakin(module, steps=4, directory=str(tmp_path))
    found = run_anakin(module, directory=str(tmp_path))
    whole = run_anakin(module, directory="")
    assert (first.returns, found.begun, found.updates) == ([], 4, 8)
    assert found.returns == whole.returns
    assert [update for update, _ in found.returns] == [8] * 8
    jax.tree.map(np.testing.assert_array_equal, found.params, whole.params)
    moved = jax.tree.map(lambda a, b: (a != b).any(), first.params, found.params)
    assert all(jax.tree.leaves(moved))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))


@pytest.mark.slow
@AGENTS
def test_a_run_on_the_devices_ends_with_numbers_and_a_curve(module, tmp_path, capsys):
    module.main(module.Config(**SMALL, seeds=2, directory=str(tmp_path)))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["steps"], found["scale"], found["replicas"]) == (8, "anakin", 8)
    assert len(found["returns"]) == 2
    assert found["average_return"] == min(found["returns"])
    least = pendulum.STEPS * pendulum.REWARDS[0]
    assert least <= min(found["returns"]) < max(found["returns"]) <= 0
    assert found["steps_per_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["learning_curve.png"]


class WithoutGraphics(sac_control.Config):
    """Fails as MuJoCo does where `MUJOCO_GL` names a library that is not there."""

    def film(self, choose, *, seed):
        raise RuntimeError("invalid value for environment variable MUJOCO_GL")


def test_a_film_that_cannot_be_is_left_out_with_the_reason(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    config = WithoutGraphics(**ANAKIN, directory=str(tmp_path))
    agent = sac_control.make_agent(config)
    found = Learned(params={}, updates=1, begun=0, returns=[], seconds=1.0)
    control_runs.film(config, agent, found, 0)
    reason = "no frames, by MUJOCO_GL=osmesa: RuntimeError('invalid value"
    assert capsys.readouterr().out.startswith(reason)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["d4pg_control", "sac_control"])
def test_a_program_ends_with_numbers_and_with_pictures_or_a_reason(name, tmp_path):
    pytest.importorskip("mujoco", reason="jax-replicator[control]")
    flags = ["--scale=program", "--launch_type=processes", "--seeds=1", "--steps=64"]
    flags += ["--batch_size=16", "--least=100", "--hidden=8", "--episodes=2"]
    done = command(name, *flags, f"--directory={tmp_path}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["steps"], found["scale"]) == (64, "program")
    assert all(1 <= each <= 1_000 for each in found["returns"])
    has_reason = "no frames, by MUJOCO_GL=" in done.stdout
    assert (tmp_path / "episode.png").exists() != has_reason
