import jax
import numpy as np

from experiments.environments import catch
from experiments.environments.catch import CatchEnvironment
from replicator.launchpad_bridge.acting import from_dm_env


def test_a_caught_ball_gives_one_and_a_missed_one_costs_one():
    def outcome(column, action):
        board = catch.begin(np.int64(column))
        for _ in range(catch.STEPS):
            assert not catch.is_over(board)
            board = catch.move(board, action)
        assert catch.is_over(board)
        return catch.reward(board)

    # The paddle starts in column 2 and reaches the walls.
    found = [[outcome(column, action) for action in range(3)] for column in range(5)]
    assert found == [[1, -1, -1], [-1] * 3, [-1, 1, -1], [-1] * 3, [-1, -1, 1]]


def test_the_ball_and_the_paddle_are_seen():
    seen = CatchEnvironment(seed=0).reset().observation
    assert seen[0].sum() == 1
    assert seen[-1].tolist() == [0, 0, 1, 0, 0]
    assert seen.sum() == 2


def test_balls_start_in_every_column_alike():
    environment = CatchEnvironment(seed=0)
    columns = [environment.reset().observation[0].argmax() for _ in range(2000)]
    np.testing.assert_allclose(np.bincount(columns) / 2000, 0.2, atol=0.03)


def test_a_snapshot_goes_on_as_the_original():
    original, copy = (from_dm_env([CatchEnvironment] * 3) for _ in range(2))
    original.reset(0)
    actions = np.random.default_rng(0).integers(3, size=(40, 3))
    for action in actions[:13]:
        original.step(action)
    copy.restore(original.snapshot())
    for action in actions:
        for found, expected in zip(
            copy.step(action), original.step(action), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


def test_boards_in_a_compiled_step_play_as_the_environment_of_actors(key):
    actions = np.random.default_rng(0).integers(3, size=(60, 1))
    keys = jax.random.split(key, 61)
    step = jax.jit(catch.step)
    environment = CatchEnvironment(seed=0)
    boards = catch.reset(keys[:1])
    for action, next_key in zip(actions, keys[1:], strict=True):
        if boards.first[0]:  # where the ball falls each draws by itself
            column = int(boards.board.column[0])
            start = {"board": [0, column, 2], "has_ended": False}
            environment.restore(environment.snapshot() | start)
        had_ended = bool(boards.last[0])
        boards = step(boards, action.astype(np.int32), next_key[None])
        if not had_ended:
            expected = environment.step(action[0])
            np.testing.assert_array_equal(boards.observation[0], expected.observation)
            assert boards.reward[0] == expected.reward
            assert boards.discount[0] == expected.discount
            assert boards.last[0] == expected.last()
        assert boards.first[0] == had_ended


def test_boards_in_a_compiled_step_start_their_balls_in_every_column(key):
    boards = catch.reset(jax.random.split(key, 2000))
    np.testing.assert_allclose(np.bincount(boards.board.column) / 2000, 0.2, atol=0.03)
