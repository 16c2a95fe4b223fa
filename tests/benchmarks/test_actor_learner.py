"""Windows of the ways of working give the numbers that are reported of them."""

import gymnasium
import numpy as np
import pytest

from benchmarks.actor_learner.counters import Counters
from benchmarks.actor_learner.pong import SHAPE, Pong
from benchmarks.actor_learner.ratios import budget_us, ratios
from benchmarks.actor_learner.window import Window


def window(*, acted=0, trained=0, stepping_s=0.0, actors_s=0.0, learner_s=0.0):
    return Window(
        seconds=1.0,
        acted=acted,
        trained=trained,
        stepping_s=stepping_s,
        actors_s=actors_s,
        learner_s=learner_s,
    )


WINDOWS = {
    "acting": [window(acted=1000, stepping_s=0.2, actors_s=0.3)],
    "again": [window(acted=1100, actors_s=0.33)],
    "taking": [window(acted=900, trained=900, actors_s=0.36, learner_s=0.09)],
    "updates": [window(trained=1000, learner_s=0.4)],
    "program": [window(acted=500, trained=500, actors_s=0.25, learner_s=0.25)],
    "in_turn": [window(trained=200)],
    "waiting": [window(trained=300)],
}


def test_ratios_compare_the_ways_of_one_round():
    found = {name: each.median for name, each in ratios(WINDOWS).items()}
    assert found == pytest.approx(
        {
            **{"bridge_ratio": 900 / 1050, "bridge_cpu_ratio": 0.6, "aa_ratio": 1.1},
            **{"cpu_ratio": 0.7, "async_over_sync": 1.5},
        }
    )


def test_parts_of_a_step_add_up_to_what_the_program_takes():
    parts = budget_us(WINDOWS)
    assert parts == pytest.approx(
        {
            **{"environment": 200, "inference": 100, "insert": 100, "take": 100},
            **{"learn": 400, "rest": 100},
        }
    )


def test_counters_mapped_twice_are_the_same_ones(tmp_path):
    counters = Counters(tmp_path / "counts", 2)
    other = Counters(tmp_path / "counts", 2, "r+")
    other.enter(1)
    other.add_acted(1, 16, 0.25)
    other.add_updates(3)
    found = counters.read()
    assert (found.acted, found.updates, found.stepping_s) == (16, 3, 0.25)
    assert found.processor_s[0] == 0.0
    assert found.processor_s[1] > 0.0


def test_pong_shifts_its_frames_and_repeats_a_game_by_its_seed():
    def play():
        game = Pong()
        seen = [game.reset(seed=3)[0], *(game.step(t % 6)[0] for t in range(50))]
        return np.stack(seen)

    one = play()
    assert one.shape == (51, *SHAPE)
    np.testing.assert_array_equal(one[1:, ..., :-1], one[:-1, ..., 1:])
    np.testing.assert_array_equal(one, play())
    assert isinstance(Pong(), gymnasium.Env)
