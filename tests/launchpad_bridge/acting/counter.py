"""A small environment that depends on chance, with the faces of gymnasium and dm_env.

It shows how far it has come, modulo its width. The reward is 1 if the action's parity
is that of the next draw, an episode ends after a drawn number of steps: by termination
where that is even, cut off where it is odd.
"""

import dm_env
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from replicator.launchpad_bridge.learner.published import Variables

WIDTH = 5


class Counter(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        place=gymnasium.spaces.Box(0, 1, (WIDTH,), np.float32),
        count=gymnasium.spaces.Box(0, 1 << 20, (), np.int32),
    )
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self._rng = np.random.default_rng(0)
        self._count = self._end = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._count, self._end = 0, int(self._rng.integers(2, 9))
        return self._observation(), {}

    def step(self, action):
        self._count += 1
        reward = float(int(action) == self._rng.integers(2))
        is_over = self._count == self._end
        is_even = self._end % 2 == 0
        return self._observation(), reward, is_over and is_even, is_over > is_even, {}

    def _observation(self):
        place = np.zeros(WIDTH, np.float32)
        place[self._count % WIDTH] = 1
        return {"place": place, "count": np.int32(self._count)}


class GoesBack(Counter):
    """A counter with snapshots."""

    def snapshot(self):
        return self._count, self._end, self._rng.bit_generator.state

    def restore(self, snapshot):
        self._count, self._end, self._rng.bit_generator.state = snapshot


class DmCounter(dm_env.Environment):
    """The same, of dm_env."""

    def __init__(self, seed):
        self._env, self._seed = GoesBack(), seed

    def reset(self):
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return dm_env.restart(observation)

    def step(self, action):
        observation, reward, terminated, truncated, _ = self._env.step(action)
        if truncated:
            return dm_env.truncation(reward, observation)
        make = dm_env.termination if terminated else dm_env.transition
        return make(reward, observation)

    def snapshot(self):
        return self._env.snapshot()

    def restore(self, snapshot):
        self._seed = None
        self._env.restore(snapshot)

    def observation_spec(self):
        raise NotImplementedError

    action_spec = observation_spec


def policy(variables, observation, first, core, key):
    """Draw from logits of what is seen and of a recurrent state."""
    core = jnp.where(first[:, None], 0, core)
    core = jnp.tanh(core + observation["place"])
    logits = core @ variables["params"]["w"]
    action = jax.random.categorical(key, logits).astype(jnp.int32)
    return action, {"logits": logits}, core


def keyed_policy(variables, observation, first, core, key):
    """Tell which key each step is drawn by."""
    n = first.shape[0]
    data = jnp.broadcast_to(jax.random.key_data(key), (n, 2))
    return jnp.zeros(n, jnp.int32), {"key": data}, core


def initial_core(size):
    return np.zeros((size, WIDTH), np.float32)


def variables_of(version):
    """Return what a learner might publish."""
    w = np.random.default_rng(version).normal(size=(WIDTH, 2)).astype(np.float32)
    return {"params": {"w": w}}


def published(version):
    return Variables(version=version, values=variables_of(version))
