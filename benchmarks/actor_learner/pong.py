"""Pong as an environment of gymnasium, with nothing of this repository or of JAX.

RLlib steps the same one in a virtual environment of its own. Preprocessing is the
cheapest that makes the usual frames: every fourth screen, 84 × 84 of its pixels, the
last four of them. Actions are sticky (Machado et al. 2018, "Revisiting the Arcade
Learning Environment", §5).
"""

from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py import roms

SHAPE = (84, 84, 4)
NUM_ACTIONS = 6
_FRAMES_PER_STEP = 4
_SCREEN = (210, 160)
_ROWS = np.linspace(0, _SCREEN[0] - 1, SHAPE[0]).astype(np.intp)[:, None]
_COLUMNS = np.linspace(0, _SCREEN[1] - 1, SHAPE[1]).astype(np.intp)


class Pong(gymnasium.Env):
    """One game."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
        self._screen = np.empty(_SCREEN, np.uint8)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale = ale_py.ALEInterface()
        self._load(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game; with a seed, that one of it."""
        if seed is not None:
            self._load(seed)
        self._ale.reset_game()
        self._frames = np.zeros(SHAPE[:2], "<u4")
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold a button for four screens."""
        pressed = self._actions[int(action)]
        reward = 0.0
        for _ in range(_FRAMES_PER_STEP):
            reward += self._ale.act(pressed)
        return self._look(), reward, self._ale.game_over(), False, {}

    def _load(self, seed: int) -> None:
        self._ale.setInt("random_seed", seed % 2**31)
        self._ale.setFloat("repeat_action_probability", 0.25)
        self._ale.loadROM(str(roms.get_rom_path("pong")))
        self._actions = self._ale.getMinimalActionSet()

    def _look(self) -> np.ndarray:
        """Return the last four frames, the newest at the end."""
        self._ale.getScreenGrayscale(self._screen)
        # A pixel of four frames is the four bytes of a number, the oldest the lowest.
        newest = self._screen[_ROWS, _COLUMNS].astype("<u4") << 24
        self._frames = self._frames >> 8 | newest
        return self._frames[..., None].view(np.uint8)
