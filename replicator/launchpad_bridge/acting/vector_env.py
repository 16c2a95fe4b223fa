"""A `VectorEnv` of gymnasium as actors see it."""

from typing import Any, final

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting.environment_state import (
    can_snapshot,
    restore,
    snapshot,
)
from replicator.launchpad_bridge.acting.environments import Step, first_step
from replicator.launchpad_bridge.acting.snapshots import pack, unpack

_NEXT_STEP = "NextStep"


def from_gymnasium(vector_env: Any) -> "GymnasiumVector":
    """Adapt a vectorised environment of gymnasium.

    Args:
      vector_env: With `AutoresetMode.NEXT_STEP`. It can be gone back to where it has
        methods `snapshot` and `restore` itself (`environment_state`); of a
        `SyncVectorEnv`, give the environments to `from_gymnasium_envs` instead.

    Returns:
      A `VectorEnvironment`.

    Raises:
      ArgumentError: It starts episodes again in another way.

    >>> import gymnasium
    >>> environment = from_gymnasium(gymnasium.make_vec("CartPole-v1", num_envs=2))
    >>> environment.reset(seed=0).first
    array([ True,  True])
    >>> environment.step(np.array([0, 1])).reward
    array([1., 1.], dtype=float32)
    """
    mode = vector_env.metadata.get("autoreset_mode")
    if getattr(mode, "value", mode) != _NEXT_STEP:
        raise ArgumentError(
            "`vector_env` must start episodes again at the next step, got "
            f"autoreset_mode={mode} of {type(vector_env).__name__}. Make it with "
            "`autoreset_mode=AutoresetMode.NEXT_STEP`."
        )
    return GymnasiumVector(vector_env)


@final
class GymnasiumVector:
    """The `VectorEnvironment` of a `VectorEnv`; made by `from_gymnasium`.

    Attributes:
      size: How many environments there are.
    """

    def __init__(self, vector_env: Any) -> None:
        self.size: int = vector_env.num_envs
        self._env = vector_env
        self._step: Step | None = None

    @property
    def can_snapshot(self) -> bool:
        """Return whether `snapshot` and `restore` can be called."""
        return can_snapshot(self._env)

    def reset(self, seed: int) -> Step:
        """Begin new episodes; see `VectorEnvironment`."""
        observation, _ = self._env.reset(seed=seed)
        self._step = first_step(observation, self.size)
        return self._step

    def step(self, actions: PyTree) -> Step:
        """Take a step in each; see `VectorEnvironment`."""
        assert self._step is not None, "reset it first"
        first = self._step.last
        observation, reward, terminated, truncated, _ = self._env.step(actions)
        goes_on = ~first
        self._step = Step(
            observation,
            np.asarray(reward, np.float32) * goes_on,
            (goes_on & ~terminated).astype(np.float32),
            first,
            terminated | truncated,
        )
        return self._step

    def snapshot(self) -> bytes:
        """Return the environments' state and the latest step."""
        assert self._step is not None, "reset it first"
        return pack((snapshot(self._env), tuple(self._step)))

    def restore(self, snapshot: bytes) -> Step:
        """Go back to a snapshot; see `VectorEnvironment`."""
        state, step = unpack(snapshot)
        restore(self._env, state)
        self._step = Step(*step)
        return self._step

    def close(self) -> None:
        """End what the environments have started."""
        self._env.close()
