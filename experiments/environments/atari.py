"""Atari 2600 games as Machado et al. 2018 evaluate them, §5 and table 5.

"Revisiting the Arcade Learning Environment: Evaluation protocols and open problems for
general agents": an action is repeated with probability 0.25 whatever the agent wants
(sticky actions), every fourth frame is seen, an episode ends with the game and not with
a life, or after half an hour of play (108,000 frames). No random number of idle frames
at the beginning: sticky actions are the chance in it. Actions are the smallest set that
the game uses. As usual since Mnih et al. 2015 a picture is the greater of the last two
frames, in grey, of 84 × 84, and an observation the last four pictures. Rewards are the
game's own points.

The games come with `ale_py`. `make_games` runs many of one kind by its threads, which
do not hold Python's lock: 2,850 steps (11,400 frames) per CPU second. `AtariGame` is
one game in Python, 2,500 steps; its state can be taken out and put back.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py import ALEInterface, LoggerMode, roms
from ale_py.vector_env import AtariVectorEnv

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting import VectorEnvironment, from_gymnasium

OBSERVATION = (4, 84, 84)  # pictures, height, width; uint8
FRAMES_PER_STEP = 4
_MOST_FRAMES = 108_000  # half an hour
_STICKY = 0.25


def num_actions(game: str) -> int:
    """Return how many actions a game has.

    Raises:
      ArgumentError: There is no such game.
    """
    return len(_emulator(game, _STICKY).getMinimalActionSet())


def make_games(
    game: str, size: int, *, threads: int = 1, sticky: float = _STICKY
) -> VectorEnvironment:
    """Make several games of a kind, which cannot be gone back to.

    Args:
      game: As `ale_py` writes it: "pong", "ms_pacman".
      size: How many.
      threads: That run them.
      sticky: Probability with which an action is repeated.

    Returns:
      With observations uint8 [size, 4, 84, 84].

    Raises:
      ArgumentError: There is no such game.
    """
    _rom(game)
    games = AtariVectorEnv(
        game,
        size,
        num_threads=threads,
        repeat_action_probability=sticky,
        max_num_frames_per_episode=_MOST_FRAMES,
        noop_max=0,
        use_fire_reset=False,
        reward_clipping=False,
    )
    return from_gymnasium(games)


class AtariGame(gymnasium.Env):
    """One game; its state, with the emulator's chance, can be taken out and put back.

    >>> game = AtariGame("pong")
    >>> observation, _ = game.reset(seed=0)
    >>> observation.shape, game.action_space.n
    ((4, 84, 84), np.int64(6))
    """

    def __init__(self, game: str, *, sticky: float = _STICKY) -> None:
        """Load a game.

        Args:
          game: As `ale_py` writes it.
          sticky: Probability with which an action is repeated.

        Raises:
          ArgumentError: There is no such game.
        """
        self._game, self._sticky = game, sticky
        self._ale = _emulator(game, sticky)
        self._actions = self._ale.getMinimalActionSet()
        self._pictures = np.zeros(OBSERVATION, np.uint8)
        self._screens = np.zeros((2, *self._ale.getScreenDims()), np.uint8)
        self.observation_space = gymnasium.spaces.Box(0, 255, OBSERVATION, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game; a seed begins the emulator's chance anew."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._ale = _emulator(self._game, self._sticky, seed)
        self._ale.reset_game()
        self._pictures[:] = 0
        self._ale.getScreenGrayscale(self._screens[1])
        self._pictures[-1] = _small(self._screens[1])
        return self._pictures.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold a button for four frames."""
        gained = 0.0
        for frame in range(FRAMES_PER_STEP):
            gained += self._ale.act(self._actions[action])
            if self._ale.game_truncated():  # its last frame is bootstrapped from
                self._ale.getScreenGrayscale(self._screens[0])
                self._screens[1] = self._screens[0]
            if self._ale.game_over():
                break
            if frame >= FRAMES_PER_STEP - 2:
                self._ale.getScreenGrayscale(self._screens[frame % 2])
        self._pictures[:-1] = self._pictures[1:]
        self._pictures[-1] = _small(self._screens.max(axis=0))
        truncated = self._ale.game_truncated()
        terminated = self._ale.game_over(with_truncation=False)
        return self._pictures.copy(), gained, terminated, truncated, {}

    def render(self) -> np.ndarray:
        """Return the screen, uint8 [210, 160, 3]."""
        return self._ale.getScreenRGB()

    def snapshot(self) -> dict[str, Any]:
        """Return all that what follows depends on, as plain data and arrays."""
        state = self._ale.cloneState(include_rng=True).serialize()
        seen = {"pictures": self._pictures.copy(), "screens": self._screens.copy()}
        return {"emulator": state, **seen}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to where a snapshot was taken, of this game or of another."""
        self._ale.restoreState(ale_py.ALEState(snapshot["emulator"]))
        self._pictures[:] = snapshot["pictures"]
        if "screens" in snapshot:  # not in older ones
            self._screens[:] = snapshot["screens"]


def film(
    game: str, choose: Callable[..., np.ndarray], *, seed: int
) -> tuple[list[np.ndarray], float]:
    """Return the screens of an episode, uint8 [210, 160, 3] each, and its return.

    Args:
      game: As `ale_py` writes it.
      choose: `choose(observation, first, t)` returns actions [1].
      seed: Of the episode.
    """
    played = AtariGame(game)
    observation, _ = played.reset(seed=seed)
    screens, total, has_ended, t = [played.render()], 0.0, False, 0
    while not has_ended:
        action = choose(observation[None], np.array([t == 0]), t)[0]
        observation, gained, terminated, truncated, _ = played.step(int(action))
        screens.append(played.render())
        total, has_ended, t = total + gained, terminated or truncated, t + 1
    return screens, total


def _small(screen: np.ndarray) -> np.ndarray:
    """Return a picture of 84 × 84, each pixel the mean of the area it covers."""
    # Not by matrix products: those of NumPy start threads, and wait for a free core.
    rows, row_weights = _areas(screen.shape[0], OBSERVATION[1])
    columns, column_weights = _areas(screen.shape[1], OBSERVATION[2])
    tall: Any = sum(
        screen[index] * weight[:, None]
        for index, weight in zip(rows, row_weights, strict=True)
    )
    wide: Any = sum(
        tall.take(index, axis=1) * weight
        for index, weight in zip(columns, column_weights, strict=True)
    )
    return np.rint(wide).astype(np.uint8)


@functools.cache
def _areas(pixels: int, into: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which pixels each of fewer ones covers, and the share of each.

    Returns:
      Indices and float32 weights, both [most, into].
    """
    size = pixels / into
    begin, end = (np.arange(into) + edge for edge in (0, 1))
    indices = (
        np.floor(begin * size).astype(int) + np.arange(math.ceil(size) + 1)[:, None]
    )
    covered = np.minimum(end * size, indices + 1) - np.maximum(begin * size, indices)
    weights = np.maximum(covered, 0.0) / size
    return np.minimum(indices, pixels - 1), weights.astype(np.float32)


def _emulator(game: str, sticky: float, seed: int = 0) -> ALEInterface:
    ALEInterface.setLoggerMode(LoggerMode.Error)
    emulator = ALEInterface()
    emulator.setFloat("repeat_action_probability", sticky)
    emulator.setInt("max_num_frames_per_episode", _MOST_FRAMES)
    emulator.setInt("random_seed", seed)
    emulator.loadROM(_rom(game))
    return emulator


def _rom(game: str) -> Any:
    if game not in roms.get_all_rom_ids():
        raise ArgumentError(
            f"`game` must be one that `ale_py` carries, got {game!r}. Use 'pong'."
        )
    return roms.get_rom_path(game)
