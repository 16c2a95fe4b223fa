"""Plain environments of gymnasium or `dm_env`, stepped one by one in one thread."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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


def from_gymnasium_envs(
    makers: Sequence[Callable[[], Any]], *, infos: Sequence[str] = ()
) -> "SerialEnvironments":
    """Adapt several environments of gymnasium; the adapter resets them.

    Args:
      makers: Each makes one. Environment i is seeded with `seed + i`, as in a
        `SyncVectorEnv`. They can be snapshot if each supports it
        (`environment_state`).
      infos: See `from_gymnasium`.

    Returns:
      A `VectorEnvironment`.

    Raises:
      ArgumentError: `makers` is empty.

    >>> import gymnasium
    >>> make = lambda: gymnasium.make("CartPole-v1", max_episode_steps=2)
    >>> environment = from_gymnasium_envs([make, make])
    >>> step = environment.reset(seed=0)
    >>> for _ in range(2):
    ...     step = environment.step(np.array([0, 1]))
    >>> step.last, step.discount
    (array([ True,  True]), array([1., 1.], dtype=float32))
    """
    return SerialEnvironments([_Gymnasium(make(), infos) for make in makers])


def from_dm_env(makers: Sequence[Callable[[int], Any]]) -> "SerialEnvironments":
    """Adapt several environments of `dm_env`.

    Args:
      makers: Each makes one from a seed, as `dm_env` cannot seed an environment later:
        `reset(seed)` makes them anew, environment i from `seed + i`. They can be
        snapshot if each has methods `snapshot` and `restore` (`environment_state`).

    Returns:
      A `VectorEnvironment`.

    Raises:
      ArgumentError: `makers` is empty.
    """
    return SerialEnvironments([_DmEnv(make) for make in makers])


class _Outcome(NamedTuple):
    observation: PyTree
    reward: float
    discount: float
    is_last: bool


class SerialEnvironments:
    """Several environments as one; made by `from_gymnasium_envs` and `from_dm_env`.

    Attributes:
      size: Number of environments.
    """

    def __init__(self, ones: Sequence["_Gymnasium | _DmEnv"]) -> None:
        if not ones:
            raise ArgumentError(
                "`makers` must hold at least one function, got none. Pass `[make]`."
            )
        self.size = len(ones)
        self._ones = ones
        self._step: Step | None = None

    @property
    def can_snapshot(self) -> bool:
        """Return whether `snapshot` and `restore` can be called."""
        return all(can_snapshot(one.environment) for one in self._ones)

    def reset(self, seed: int) -> Step:
        """Begin new episodes; see `VectorEnvironment`."""
        observations = [one.reset(seed + i) for i, one in enumerate(self._ones)]
        self._step = first_step(_stacked(observations), self.size)
        return self._step

    def step(self, actions: PyTree) -> Step:
        """Take a step in each; see `VectorEnvironment`."""
        assert self._step is not None, "reset it first"
        first = self._step.last
        took = [
            _Outcome(one.reset(None), 0.0, 0.0, False) if starts else one.step(action)
            for one, action, starts in zip(
                self._ones, _rows(actions, self.size), first.tolist(), strict=True
            )
        ]
        observations, rewards, discounts, lasts = zip(*took, strict=True)
        self._step = Step(
            _stacked(observations),
            np.array(rewards, np.float32),
            np.array(discounts, np.float32),
            first,
            np.array(lasts, bool),
        )
        return self._step

    def snapshot(self) -> bytes:
        """Return the environments' state and the latest step."""
        assert self._step is not None, "reset it first"
        states = [snapshot(one.environment) for one in self._ones]
        return pack((states, tuple(self._step)))

    def restore(self, snapshot: bytes) -> Step:
        """Go back to a snapshot; see `VectorEnvironment`."""
        states, step = unpack(snapshot)
        for one, state in zip(self._ones, states, strict=True):
            restore(one.environment, state)
        self._step = Step(*step)
        return self._step

    def close(self) -> None:
        """Close the environments."""
        for one in self._ones:
            one.close()


class _Gymnasium:
    """One environment of gymnasium."""

    def __init__(self, environment: Any, infos: Sequence[str]) -> None:
        self.environment = environment
        self._infos = tuple(infos)

    def reset(self, seed: int | None) -> PyTree:
        """Begin an episode; return its first observation. None keeps the generator."""
        observation, infos = self.environment.reset(seed=seed)
        return with_infos(observation, infos, self._infos)

    def step(self, action: PyTree) -> _Outcome:
        observation, reward, terminated, truncated, info = self.environment.step(action)
        seen = with_infos(observation, info, self._infos)
        discount = 0.0 if terminated else 1.0
        return _Outcome(seen, reward, discount, terminated or truncated)

    def close(self) -> None:
        self.environment.close()


class _DmEnv:
    """One environment of `dm_env`, made when it is first needed."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._made: Any = None

    @property
    def environment(self) -> Any:
        if self._made is None:  # for `can_snapshot`, or for `restore`
            self._made = self._make(0)
        return self._made

    def reset(self, seed: int | None) -> PyTree:
        if seed is not None:
            self.close()
            self._made = self._make(seed)
        return self._made.reset().observation

    def step(self, action: PyTree) -> _Outcome:
        step = self._made.step(action)
        return _Outcome(step.observation, step.reward, step.discount, step.last())

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    """Return a tree of arrays with a new first axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _rows(tree: PyTree, size: int) -> Iterable[PyTree]:
    """Return the rows of a tree of arrays as trees."""
    if isinstance(tree, np.ndarray):  # by far the most frequent kind of actions
        return tree
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(size)]
