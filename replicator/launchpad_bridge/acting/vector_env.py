"""Adapt a `VectorEnv` of gymnasium for actors."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting.environment_state import (
    can_snapshot,
    restore,
    snapshot,
)
from replicator.launchpad_bridge.acting.environments import (
    Step,
    first_step,
    with_infos,
)
from replicator.launchpad_bridge.acting.snapshots import pack, unpack

_NEXT_STEP, _SAME_STEP = "NextStep", "SameStep"


def from_gymnasium(vector_env: Any, *, infos: Sequence[str] = ()) -> "GymnasiumVector":
    """Adapt a vectorised environment of gymnasium.

    Args:
      vector_env: With `AutoresetMode.NEXT_STEP`, or `SAME_STEP`: there an environment
        that has started again is stepped once and then reset alone
        (`options={"reset_mask": ...}`, which it must support), so that each action has
        its observation. It can be snapshot if it has methods `snapshot` and `restore`
        itself (`environment_state`); give the environments of a `SyncVectorEnv` to
        `from_gymnasium_envs` instead.
      infos: Names of values in its infos, present at every step, for the policy:
        observations are {"observation": ..., "info": {name: ...}} then.

    Returns:
      A `VectorEnvironment`.

    Raises:
      ArgumentError: It has another autoreset mode.

    >>> import gymnasium
    >>> environment = from_gymnasium(gymnasium.make_vec("CartPole-v1", num_envs=2))
    >>> environment.reset(seed=0).first
    array([ True,  True])
    >>> environment.step(np.array([0, 1])).reward
    array([1., 1.], dtype=float32)
    """
    mode = vector_env.metadata.get("autoreset_mode")
    value = getattr(mode, "value", mode)
    if value not in (_NEXT_STEP, _SAME_STEP):
        raise ArgumentError(
            "`vector_env` must start episodes again at the next step, or the same, got "
            f"autoreset_mode={mode} of {type(vector_env).__name__}. Make it with "
            "`autoreset_mode=AutoresetMode.NEXT_STEP`."
        )
    return GymnasiumVector(vector_env, infos=infos, is_same_step=value == _SAME_STEP)


class GymnasiumVector:
    """The `VectorEnvironment` of a `VectorEnv`; made by `from_gymnasium`.

    Attributes:
      size: Number of environments.
    """

    def __init__(
        self, vector_env: Any, *, infos: Sequence[str], is_same_step: bool
    ) -> None:
        self.size: int = vector_env.num_envs
        self._env = vector_env
        self._infos = tuple(infos)
        self._is_same_step = is_same_step
        self._step: Step | None = None

    @property
    def can_snapshot(self) -> bool:
        """Return whether `snapshot` and `restore` can be called."""
        return can_snapshot(self._env)

    def reset(self, seed: int) -> Step:
        """Begin new episodes; see `VectorEnvironment`."""
        observation, infos = self._env.reset(seed=seed)
        seen = with_infos(observation, infos, self._infos)
        self._step = first_step(seen, self.size)
        return self._step

    def step(self, actions: PyTree) -> Step:
        """Take a step in each; see `VectorEnvironment`."""
        assert self._step is not None, "reset it first"
        first = self._step.last
        observation, reward, terminated, truncated, infos = self._env.step(actions)
        seen = with_infos(observation, infos, self._infos)
        goes_on = ~first
        last = goes_on & (terminated | truncated)
        if self._is_same_step:
            seen = self._next_step(seen, infos, first=first, last=last)
        self._step = Step(
            seen,
            np.asarray(reward, np.float32) * goes_on,
            (goes_on & ~terminated).astype(np.float32),
            first,
            last,
        )
        return self._step

    def _next_step(
        self, seen: PyTree, infos: Any, *, first: np.ndarray, last: np.ndarray
    ) -> PyTree:
        """Return the observation if episodes started again a step after their end."""
        seen = jax.tree.map(np.array, seen)
        if first.any():
            # Their last step took an action that was not chosen for its observation.
            again, reset_infos = self._env.reset(options={"reset_mask": first.copy()})
            self._put(seen, first, again, reset_infos)
        if last.any():
            self._put(seen, last, infos["final_obs"], infos.get("final_info", {}))
        return seen

    def _put(
        self, seen: PyTree, which: np.ndarray, observation: PyTree, infos: Any
    ) -> None:
        """Write the observations of some environments into those of all."""
        keys = [key for name in self._infos for key in (name, f"_{name}")]
        for i in np.flatnonzero(which):
            own = jax.tree.map(operator.itemgetter(i), observation)
            info = {key: infos[key][i] for key in keys if key in infos}
            own = jax.tree.leaves(with_infos(own, info, self._infos))
            for leaf, row in zip(jax.tree.leaves(seen), own, strict=True):
                leaf[i] = row

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
        """Close the environments."""
        self._env.close()
