"""DQN's pictures, rewards and runs: the agent of `test_off_policy` on games."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest

import replicator
import replicator.launchpad_bridge as lp
from experiments import control_runs, evaluator, replayed, seeds
from experiments.dqn_atari import Config, make_agent
from experiments.environments import atari
from experiments.off_policy import OffPolicy
from tests.experiments.command import found_by
from tests.writers.test_writers import read_tensorboard

pytestmark = pytest.mark.usefixtures("standard_promotion")
SMALL = Config(
    torso="mlp",
    hidden=4,
    environments=2,
    steps=2,
    least=4,
    capacity=100,
    batch_size=4,
    directory="",
)


class Seeing(OffPolicy):
    """Keeps the dtypes of what its functions are compiled for."""

    seen: ClassVar[set] = set()

    def policy(self, variables, observation, *rest, steps):
        self.seen.add(("policy", observation.dtype.name))
        return super().policy(variables, observation, *rest, steps=steps)

    def step_fn(self, state, batch, key):
        for name in ("observation", "next_observation"):
            self.seen.add((name, batch["trajectories"][name].dtype.name))
        return super().step_fn(state, batch, key)


def test_pictures_are_uint8_in_the_table_and_on_the_devices():
    table = lp.ReplayTable(SMALL.capacity)
    agent = make_agent(SMALL)
    fields = [each.name for each in dataclasses.fields(agent)]
    replayed.learn(
        replicator.Replicator(1),
        Seeing(**{name: getattr(agent, name) for name in fields}),
        SMALL.make_tasks(2),
        table,
        items=SMALL.items(),
        steps_per_call=1,
        least=4,
        **seeds.options_of(SMALL, 0),
    )
    rows = table.take(4, timeout_s=60).trajectories
    for name in ("observation", "next_observation"):
        assert rows[name].dtype == np.uint8
        assert rows[name].shape == (4, *atari.OBSERVATION)
    assert rows["action"].dtype == np.int32
    assert Seeing.seen == {
        *(("policy", "uint8"), ("observation", "uint8"), ("next_observation", "uint8"))
    }


def test_rows_have_rewards_of_one_at_most():
    steps = {
        "observation": np.zeros((1, 4)),
        "first": np.array([[True, False, False, False]]),
        "last": np.zeros((1, 4), bool),
        "age": np.arange(4)[None],
        "action": np.zeros((1, 3), np.int32),
        "reward": np.array([[7.0, -2.0, 0.5]], np.float32),
        "discount": np.ones((1, 3), np.float32),
        "extras": {},
    }
    rows, _ = dataclasses.replace(SMALL, discount=0.5).items()(steps, ends=True)
    np.testing.assert_allclose(rows["reward"], [1 - 0.5 + 0.125, -1 + 0.25, 0.5])


@pytest.mark.slow
def test_a_program_plays_and_learns(tmp_path):
    config = dataclasses.replace(
        SMALL,
        scale="program",
        launch_type="threads",
        batch_size=8,  # of eight devices
        steps=4,
        steps_per_call=2,
        directory=str(tmp_path),
    )
    rep = replicator.Replicator(1)
    found = control_runs.run_program(rep, config, make_agent(config), 0)
    assert found.updates == 4
    leaves = jax.tree.leaves(found.params)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    folder = seeds.folder_of(config, 0)
    assert folder is not None
    assert (folder / evaluator.NAME).exists()
    written = read_tensorboard(folder / "tensorboard")
    assert any("loss" in values for _, values in written)


@pytest.mark.slow
def test_a_run_ends_with_numbers_and_pictures(tmp_path):
    flags = ["--env=pong", "--steps=2", "--least=40", "--hidden=8", "--episodes=1"]
    found = found_by("dqn_atari", f"--directory={tmp_path}", "--torso=mlp", *flags)
    assert -21 <= found["average_return"] <= 21
    assert found["steps_per_s"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("learning_curve.png", "episode.png")
    }


def test_a_film_has_the_screens_of_a_whole_game():
    choose = lambda observation, first, t: np.array([t % 4])  # noqa: E731
    screens, gained = atari.film("breakout", choose, seed=0)
    assert screens[0].shape == (210, 160, 3)
    assert len(screens) > 20
    assert gained >= 0
