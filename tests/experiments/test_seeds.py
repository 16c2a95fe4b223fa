"""One table over all agents that run seed after seed: they learn, and go on."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import replicator
from experiments import impala_catch, ppo_cartpole, run_folder, seeds
from experiments.returns import Learned
from replicator.errors import ArgumentError
from tests.experiments.command import found_by

pytestmark = pytest.mark.usefixtures("standard_promotion")
CATCH = impala_catch.Config(
    environments=16, unroll_length=12, hidden=8, steps=3, directory=""
)
CARTPOLE = ppo_cartpole.Config(
    environments=8, unroll_length=16, hidden=8, steps=3, epochs=2, directory=""
)
AGENTS = [(impala_catch, CATCH), (ppo_cartpole, CARTPOLE)]
NAMES = ["impala_catch", "ppo_cartpole"]
RUNS = [
    pytest.param(
        module,
        config,
        scale,
        id=f"{name}-{scale}",
        marks=[] if (name, scale) == ("impala_catch", "process") else pytest.mark.slow,
    )
    for name, (module, config) in zip(NAMES, AGENTS, strict=True)
    for scale in module.SCALES
]


@pytest.mark.parametrize(("module", "config", "scale"), RUNS)
def test_a_seed_goes_on_from_where_it_was_killed(module, config, scale, tmp_path):
    config = dataclasses.replace(config, directory=str(tmp_path))
    run, rep = module.SCALES[scale], replicator.Replicator(2)
    first = run(rep, config, 0)
    found = run(rep, dataclasses.replace(config, steps=5), 0)
    assert found.returns[: len(first.returns)] == first.returns
    assert max((update for update, _ in first.returns), default=0) <= 3
    assert (found.begun, found.updates) == (3, 5)
    assert run_folder.last_saved(tmp_path / "seed-0") == 5


@pytest.mark.slow
@pytest.mark.parametrize(("module", "config"), AGENTS, ids=NAMES)
def test_the_same_seed_plays_and_learns_the_same(module, config):
    first, second = (
        module.run_process(replicator.Replicator(1), config, 3) for _ in range(2)
    )
    assert first.returns == second.returns
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, second.params))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "config"), AGENTS, ids=NAMES)
def test_a_program_finishes_episodes_and_learns(module, config):
    found = module.run_program(replicator.Replicator(1), config, seed=0)
    assert found.updates == config.steps
    assert len(found.returns) >= 4
    new = module.make_agent(config).init_fn(jax.random.key(0))["params"]
    assert jax.tree.structure(found.params) == jax.tree.structure(new)


def learned(returns, updates=3):
    return Learned(params=None, updates=updates, begun=0, returns=returns, seconds=2.0)


def last_line(outcomes, capsys, config=CATCH):
    seeds.print_outcomes(config, outcomes, title="t", replicas=1)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_last_line_is_of_the_worst_seed_and_of_updates_that_were_made(capsys):
    outcomes = {0: learned([(1, 1.0), (2, 3.0)]), 1: learned([(1, 1.0)], updates=7)}
    found = last_line(outcomes, capsys)
    assert (found["average_return"], found["steps"]) == (1.0, 7)
    assert found["median_return"] == 1.5


def test_a_seed_in_which_no_episode_ended_has_no_return(capsys):
    config = dataclasses.replace(CATCH, seeds=2)
    outcomes = seeds.run_all(config, lambda seed: learned([(1, 1.0)][:seed]))
    assert "seed 0: no episode after 3 updates" in capsys.readouterr().out
    assert last_line(outcomes, capsys)["average_return"] is None


def saved(config):
    """Return what runs a seed and leaves a checkpoint."""

    def run(seed):
        folder = seeds.folder_of(config, seed)
        (run_folder.checkpoints_of(folder) / "000000000003").mkdir(parents=True)
        return learned([(1, 1.0)])

    return run


def test_a_seed_that_was_left_out_keeps_what_it_is_saved_with(tmp_path, capsys):
    config = dataclasses.replace(CATCH, seeds=2, directory=str(tmp_path))
    seeds.run_all(config, saved(config))  # killed before the last line
    one = dataclasses.replace(config, seeds=1)
    last_line(seeds.run_all(one, lambda seed: learned([(1, 1.0)])), capsys, one)
    other = dataclasses.replace(config, learning_rate=1.0)
    with pytest.raises(ArgumentError, match="`--learning_rate` must be "):
        seeds.run_all(other, saved(other))


@pytest.mark.parametrize(
    ("module", "change", "message"),
    [
        (ppo_cartpole, {"unroll_length": 15}, "`--unroll_length` must divide evenly"),
        (ppo_cartpole, {"environments": 6}, "`--environments` .* over 4 replicas"),
        (
            ppo_cartpole,
            {"actors": 3, "scale": "program"},
            "`--environments` must divide evenly over 3 actors",
        ),
        (ppo_cartpole, {"actors": 4}, "`--actors` must come with `--scale=program`"),
        (
            ppo_cartpole,
            {"launch_type": "ray"},
            "`--launch_type` must come with `--scale=program`, got ray with process",
        ),
    ],
)
def test_flags_that_do_not_fit_each_other_are_refused(module, change, message):
    with pytest.raises(ArgumentError, match=message):
        module.check(dataclasses.replace(CARTPOLE, **change), 4)


PROGRAM = ["--scale=program", "--launch_type=processes"]
NIGHTLY = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("ppo_cartpole", ["--seeds=1"]),
        pytest.param("ppo_cartpole", ["--seeds=1", *PROGRAM], marks=NIGHTLY),
        ("impala_catch", ["--seeds=2"]),
        ("impala_catch", ["--seeds=2", "--scale=anakin"]),
        # Threads share one lock of Python: a minute and a half.
        pytest.param("impala_catch", ["--seeds=2", PROGRAM[0]], marks=NIGHTLY),
        pytest.param("impala_catch", ["--seeds=2", *PROGRAM], marks=NIGHTLY),
        pytest.param(
            "impala_catch", ["--seeds=2", PROGRAM[0], "--launch_type=ray"], id="ray"
        ),
    ],
)
def test_what_the_experiment_is_about_is_learned_in_time(name, flags, tmp_path):
    found = found_by(name, *flags, f"--directory={tmp_path}")
    least, seconds = {"ppo_cartpole": (475, 900), "impala_catch": (0.95, 360)}[name]
    assert found["average_return"] >= least
    assert found["seconds"] <= seconds
    pictures = {path.name for path in tmp_path.iterdir()}
    assert pictures == {"learning_curve.png"} | (
        {"episode.png"} if name == "impala_catch" else set()
    )
