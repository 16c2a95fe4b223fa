"""Continuous control: tasks of gymnasium's MuJoCo and of the DeepMind Control Suite.

Agents act in [-1, 1] and see one vector of float32. Each dimension of an action is
scaled to its own bounds here, at the environment. Episodes end after 1,000 steps, cut
by time.
"""

from collections.abc import Callable
from typing import Any

import dm_env
import gymnasium
import numpy as np
from dm_env import specs

from replicator.errors import ArgumentError
from replicator.launchpad_bridge import acting

_FILMED_EVERY = 10  # steps
SUITE = "dm_control/"  # before a domain and a task: "dm_control/cartpole-swingup"


def make_tasks(name: str, size: int, index: int = 0) -> acting.VectorEnvironment:
    """Make so many environments of a task, for the actor of an index.

    Args:
      name: As gymnasium writes it, `InvertedPendulum-v5`, or of the Control Suite,
        `dm_control/cartpole-swingup`.
      size: How many.
      index: Of the actor; seeds come with `reset`.

    Raises:
      ArgumentError: There is no such task, its bounds are infinite, or its package is
        not installed.
    """
    del index
    if name.startswith(SUITE):
        return acting.from_dm_env([_suite(name)] * size)
    return acting.from_gymnasium_envs([lambda: make_task(name)] * size)


def make_task(name: str, **options: Any) -> gymnasium.Env:
    """Make one of gymnasium's tasks; options are those of `gymnasium.make`.

    Raises:
      ArgumentError: As `make_tasks`.
    """
    try:
        made = gymnasium.make(name, disable_env_checker=True, **options)
    except gymnasium.error.Error as error:
        raise ArgumentError(
            f"`--env` must be a task that is installed, got {name}: {error}. Install "
            "`jax-replicator[control]`."
        ) from error
    return Scaled(made)


class Scaled(gymnasium.Wrapper):
    """A task of gymnasium whose actions are in [-1, 1], and observations float32."""

    def __init__(self, env: gymnasium.Env) -> None:
        """Wrap a task.

        Raises:
          ArgumentError: Its actions have no bounds.
        """
        super().__init__(env)
        space: Any = env.action_space
        self._scale = scaling(space.low, space.high)
        self.action_space = gymnasium.spaces.Box(-1, 1, space.shape, np.float32)

    def reset(self, **options: Any) -> Any:
        """Begin an episode."""
        observation, info = self.env.reset(**options)
        return np.asarray(observation, np.float32), info

    def step(self, action: Any) -> Any:
        """Take a step by an action in [-1, 1]."""
        observation, *rest = self.env.step(self._scale(action))
        return np.asarray(observation, np.float32), *rest


class SuiteTask(dm_env.Environment):
    """A task of the Control Suite, likewise; observations are joined to one vector."""

    def __init__(self, task: Any) -> None:
        """Wrap a task.

        Raises:
          ArgumentError: Its actions have no bounds.
        """
        self._task = task
        spec = task.action_spec()
        self._scale = scaling(spec.minimum, spec.maximum)
        self._action_spec = specs.BoundedArray(spec.shape, np.float32, -1, 1)

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode."""
        return _joined(self._task.reset())

    def step(self, action: Any) -> dm_env.TimeStep:
        """Take a step by an action in [-1, 1]."""
        return _joined(self._task.step(self._scale(action)))

    def observation_spec(self) -> Any:
        """Return the form of an observation."""
        size = sum(
            int(np.prod(each.shape)) for each in self._task.observation_spec().values()
        )
        return specs.Array((size,), np.float32)

    def action_spec(self) -> Any:
        """Return the form of an action."""
        return self._action_spec

    def render(self) -> np.ndarray:
        """Return a picture, uint8 [height, width, 3]."""
        return self._task.physics.render(camera_id=0)


def film(
    name: str, choose: Callable[..., np.ndarray], *, seed: int
) -> tuple[list[np.ndarray], float]:
    """Return pictures of an episode, uint8 [height, width, 3] each, and its return.

    Args:
      name: As of `make_tasks`.
      choose: `choose(observation, first, t)` returns actions [1].
      seed: Of the episode.

    Raises:
      Exception: There is no library of graphics; `MUJOCO_GL` names it: egl, osmesa.
    """
    if name.startswith(SUITE):
        task: Any = _suite(name)(seed)
        environment: Any = acting.from_dm_env([lambda _: task])
    else:
        # The other cameras stand still, and a cheetah runs out of the picture.
        camera = {"camera_name": "track"} if name.startswith("HalfCheetah") else {}
        task = make_task(name, render_mode="rgb_array", **camera)
        environment = acting.from_gymnasium_envs([lambda: task])
    step, frames, gained, t = environment.reset(seed), [], 0.0, 0
    while not step.last[0]:
        if t % _FILMED_EVERY == 0:
            frames.append(task.render())
        step = environment.step(choose(step.observation, step.first, t))
        gained, t = gained + float(step.reward[0]), t + 1
    return frames, gained


def sizes_of(name: str) -> tuple[tuple[int, ...], int]:
    """Return the shape of an observation, and the number of an action's dimensions."""
    if name.startswith(SUITE):
        made: Any = _suite(name)(0)
        return made.observation_spec().shape, made.action_spec().shape[0]
    task: Any = make_task(name)
    return task.observation_space.shape, task.action_space.shape[0]


def scaling(low: Any, high: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that scales actions in [-1, 1] to their bounds.

    Args:
      low: Of each dimension.
      high: Likewise.

    Raises:
      ArgumentError: A bound is infinite.

    >>> scaling(np.array([-3.0]), np.array([1.0]))(np.array([0.5]))
    array([0.])
    """
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    for name, bounds in (("low", low), ("high", high)):
        wrong = np.flatnonzero(~np.isfinite(bounds))
        if len(wrong):
            raise ArgumentError(
                f"`action_space.{name}` must be finite, got {bounds[wrong[0]]} in "
                f"dimension {wrong[0]}. Bound it by `gymnasium.wrappers.ClipAction`."
            )
    return lambda action: low + (np.asarray(action, np.float64) + 1) / 2 * (high - low)


def _suite(name: str) -> Callable[[int], dm_env.Environment]:
    """Return what makes a task of the Control Suite from a seed."""
    domain, _, task = name.removeprefix(SUITE).partition("-")
    try:
        from dm_control import suite  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ArgumentError(
            f"`--env` must be a task that is installed, got {name}: {error}. Install "
            "`jax-replicator[control]`."
        ) from error
    if (domain, task) not in suite.ALL_TASKS:
        known = ", ".join(task for of, task in suite.ALL_TASKS if of == domain)
        raise ArgumentError(
            f"`--env` must be a task of the Control Suite, got {name}; those of "
            f"{domain}: {known or 'none'}. Use {SUITE}cartpole-swingup."
        )
    return lambda seed: SuiteTask(suite.load(domain, task, {"random": seed}))


def _joined(step: dm_env.TimeStep) -> dm_env.TimeStep:
    parts = [np.ravel(each) for each in step.observation.values()]
    return step._replace(observation=np.concatenate(parts).astype(np.float32))
