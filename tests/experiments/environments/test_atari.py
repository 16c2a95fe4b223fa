import numpy as np
import pytest

from experiments.environments import atari
from experiments.environments.atari import AtariGame, make_games, num_actions
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting import from_gymnasium_envs


def test_a_game_has_its_smallest_set_of_actions():
    assert [num_actions(game) for game in ("pong", "breakout", "seaquest")] == [
        6,
        4,
        18,
    ]


def test_the_two_ways_to_play_see_and_gain_the_same():
    # Without chance: both emulators then do what they are told.
    many = make_games("breakout", 1, sticky=0.0)
    one = from_gymnasium_envs([lambda: AtariGame("breakout", sticky=0.0)])
    rng = np.random.default_rng(0)
    found, expected = one.reset(0), many.reset(0)
    ended, gained = 0, 0.0
    for _ in range(600):
        for name in ("reward", "discount", "first", "last"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        difference = np.abs(np.int16(found.observation) - expected.observation)
        # Two ways to round; the emulators differ in what they show of a game's end.
        assert found.last[0] or difference[:, -1].max() <= 1
        ended, gained = ended + found.last[0], gained + found.reward[0]
        action = rng.integers(4, size=1)
        found, expected = one.step(action), many.step(action)
    assert ended >= 2
    assert gained >= 2


def test_a_snapshot_goes_on_as_the_original_with_its_chance():
    original, copy = (
        from_gymnasium_envs([lambda: AtariGame("pong")] * 2) for _ in range(2)
    )
    original.reset(0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        original.step(rng.integers(6, size=2))
    copy.reset(7)
    copy.restore(original.snapshot())
    for _ in range(60):
        action = rng.integers(6, size=2)
        for found, expected in zip(
            copy.step(action), original.step(action), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


def test_actions_stick_by_chance_of_the_seed():
    def seen(seed):
        game = AtariGame("breakout")
        game.reset(seed=seed)
        return [game.step(2 + t % 2)[0].sum() for t in range(20)]

    assert seen(1) == seen(1)
    assert seen(1) != seen(2)


def test_a_game_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError) as error:
        make_games("Pong", 1)
    assert str(error.value) == (
        "`game` must be one that `ale_py` carries, got 'Pong'. Use 'pong'."
    )


def test_a_snapshot_holds_the_screens_that_a_game_s_end_is_seen_by():
    game, other = AtariGame("pong"), AtariGame("pong")
    game.reset(seed=0)
    for _ in range(20):
        game.step(2)
    other.restore(game.snapshot())
    np.testing.assert_array_equal(other._screens, game._screens)


def test_a_game_that_is_cut_off_shows_its_last_frame(monkeypatch):
    monkeypatch.setattr(atari, "_MOST_FRAMES", 4 * 10 + 1)
    game = AtariGame("breakout", sticky=0.0)
    game.reset(seed=0)
    while not (step := game.step(1))[3]:
        pass
    screen = np.empty_like(game._screens[0])
    game._ale.getScreenGrayscale(screen)
    np.testing.assert_array_equal(step[0][-1], atari._small(screen))
