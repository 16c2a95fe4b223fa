"""Catch: move a paddle to where a falling ball will land.

Mnih et al. 2014, "Recurrent models of visual attention", §4.2, by the rules of bsuite
(Osband et al. 2019): on a board of 10 × 5 the ball starts in the top row, in a random
column, and falls a row a step; the paddle starts in the middle of the bottom row. Where
the ball meets that row the episode ends, by a reward of 1 if it is caught and −1 if
not: nine steps.

The rules are functions that NumPy and JAX both run, so `CatchEnvironment`, one
environment for actors, and `step`, many at once in a compiled step, are one game.
"""

from typing import Any, NamedTuple, TypeAlias

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

ROWS, COLUMNS = 10, 5
NUM_ACTIONS = 3  # left, stay, right
STEPS = ROWS - 1  # of an episode
CHANCE = 2 / COLUMNS - 1  # return of whom the ball does not guide, in the mean

Array: TypeAlias = Any
"""An array of NumPy or JAX."""


class Board(NamedTuple):
    """Positions on any number of boards: integers of one shape.

    Attributes:
      row: Of the ball, 0 at the top.
      column: Of the ball.
      paddle: Its column; its row is the last.
    """

    row: Array
    column: Array
    paddle: Array


def begin(column: Array) -> Board:
    """Return boards on which the ball starts to fall in these columns."""
    return Board(column * 0, column, column * 0 + COLUMNS // 2)


def move(board: Board, action: Array) -> Board:
    """Let the ball fall by a row, and move the paddle by action − 1 columns."""
    paddle = (board.paddle + action - 1).clip(0, COLUMNS - 1)
    return Board(board.row + 1, board.column, paddle)


def is_over(board: Board) -> Array:
    """Return whether the ball is in the paddle's row."""
    return board.row == ROWS - 1


def reward(board: Board) -> Array:
    """Return 1 where the ball was just caught, −1 where it was missed, 0 elsewhere."""
    caught = (board.column == board.paddle).astype(np.int32)
    return is_over(board).astype(np.int32) * (2 * caught - 1)


def pixels(board: Board) -> Array:
    """Return the picture of one board, bool [ROWS, COLUMNS]: where something is."""
    row, column, paddle = (part[..., None, None] for part in board)
    rows, columns = np.arange(ROWS)[:, None], np.arange(COLUMNS)[None]
    ball = (rows == row) & (columns == column)
    return ball | ((rows == ROWS - 1) & (columns == paddle))


class CatchEnvironment(dm_env.Environment):
    """One board, for actors; its state can be taken out and put back.

    >>> environment = CatchEnvironment(seed=0)
    >>> environment.reset().observation.shape
    (10, 5)
    """

    def __init__(self, seed: int) -> None:
        """Make a board whose balls fall by `seed`."""
        self._random = np.random.default_rng(seed)
        self._board = begin(np.int64(0))
        self._has_ended = True

    def reset(self) -> dm_env.TimeStep:
        """Let a new ball fall."""
        self._board = begin(self._random.integers(COLUMNS))
        self._has_ended = False
        return dm_env.restart(self._observation())

    def step(self, action: int) -> dm_env.TimeStep:
        """Move the paddle; begin anew after the end of an episode, as in `dm_env`."""
        if self._has_ended:
            return self.reset()
        self._board = move(self._board, np.int64(action))
        gained = float(reward(self._board))
        self._has_ended = bool(is_over(self._board))
        if self._has_ended:
            return dm_env.termination(gained, self._observation())
        return dm_env.transition(gained, self._observation())

    def observation_spec(self) -> Any:
        """Return the form of a picture: float32, 0 or 1."""
        return specs.BoundedArray((ROWS, COLUMNS), np.float32, 0, 1, "board")

    def action_spec(self) -> Any:
        """Return the form of an action: left, stay, right."""
        return specs.DiscreteArray(NUM_ACTIONS, name="action")

    def snapshot(self) -> dict[str, Any]:
        """Return all that what follows depends on, as plain data."""
        return {
            "board": [int(part) for part in self._board],
            "has_ended": self._has_ended,
            "random": self._random.bit_generator.state,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to where a snapshot was taken, of this environment or another."""
        self._board = Board(*map(np.int64, snapshot["board"]))
        self._has_ended = snapshot["has_ended"]
        self._random.bit_generator.state = snapshot["random"]

    def _observation(self) -> np.ndarray:
        return pixels(self._board).astype(np.float32)


class Boards(NamedTuple):
    """n boards as a compiled step knows them, and what was seen of them last.

    Attributes:
      board: Where things are, int32 [n].
      observation: float32 [n, ROWS, COLUMNS].
      reward: float32 [n], of the transition to here.
      discount: float32 [n], of the transition to here: 0 where it ended an episode.
      first: bool [n], whether an episode starts here.
      last: bool [n], whether an episode ends here.
    """

    board: Board
    observation: jax.Array
    reward: jax.Array
    discount: jax.Array
    first: jax.Array
    last: jax.Array


def reset(keys: jax.Array) -> Boards:
    """Begin an episode on each of n boards, whose columns the keys [n] choose."""
    board = begin(_columns(keys))
    none, yes = jnp.zeros_like(board.row, jnp.float32), jnp.ones(board.row.shape, bool)
    return Boards(board, _pictures(board), none, none, yes, ~yes)


def step(boards: Boards, action: jax.Array, keys: jax.Array) -> Boards:
    """Take a step on each board; where an episode has ended, begin the next one.

    Args:
      boards: Before.
      action: int32 [n]; ignored where an episode has ended.
      keys: Random keys [n].

    Returns:
      The boards after: what `VectorEnvironment.step` returns of such boards.
    """
    first = boards.last
    board = jax.tree.map(
        lambda new, old: jnp.where(first, new, old),
        begin(_columns(keys)),
        move(boards.board, action),
    )
    last = is_over(board)
    return Boards(
        board,
        _pictures(board),
        reward(board).astype(jnp.float32),
        (~first & ~last).astype(jnp.float32),
        first,
        last,
    )


def _pictures(board: Board) -> jax.Array:
    return jax.vmap(pixels)(board).astype(jnp.float32)


def _columns(keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, COLUMNS))(keys)
