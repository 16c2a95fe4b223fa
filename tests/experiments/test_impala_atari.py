import dataclasses

import numpy as np
import pytest

from experiments import evaluator
from experiments.environments import atari
from experiments.impala_atari import Config, random_player, train_process
from tests.experiments.command import found_by

pytestmark = pytest.mark.usefixtures("standard_promotion")
# Of eight replicas, a trajectory each.
SMALL = Config(environments=16, batch_size=8, unroll_length=3, steps=4)


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint(tmp_path):
    first = train_process(dataclasses.replace(SMALL, directory=str(tmp_path)))
    assert first.updates == 4
    more = dataclasses.replace(SMALL, directory=str(tmp_path), steps=6)
    second = train_process(more)
    assert second.updates == 6
    kernels = [each.params["policy"]["kernel"] for each in (first, second)]
    assert not np.array_equal(*kernels)
    assert np.abs(kernels[1] - kernels[0]).max() < 0.05  # not a new beginning


@pytest.mark.slow
def test_chance_loses_at_pong():
    games = atari.make_games(SMALL.game, 4)
    gained = evaluator.play(games, random_player(SMALL, size=4), seed=0)
    assert all(-21 <= each <= -17 for each in gained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--scale=program", "--launch_type=threads"]], ids=["one", "program"]
)
def test_a_minute_of_training_ends_with_numbers_and_pictures(flags, tmp_path):
    flags = ["--game=breakout", "--minutes=0.5", "--episodes=3", *flags]
    found = found_by("impala_atari", f"--directory={tmp_path}", *flags)
    assert 0 < found["p_value"] <= 1
    assert found["steps_per_s"] > 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "learning_curve.png",
        "episode.png",
        "metrics.jsonl",
        "returns.jsonl",
    } <= names
