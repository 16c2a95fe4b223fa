"""The pendulum in JAX is gymnasium's."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.environments import pendulum

pytestmark = pytest.mark.usefixtures("standard_promotion")
step = jax.jit(pendulum.step)


def test_it_moves_as_gymnasiums():
    env = gymnasium.make("Pendulum-v1", disable_env_checker=True)
    keys = jax.random.split(jax.random.key(0), 1)
    poles, total = pendulum.reset(keys), 0.0
    env.reset(seed=0)
    env.unwrapped.state = np.array([poles.angle[0], poles.speed[0]], np.float64)
    rng = np.random.default_rng(0)
    for _ in range(50):
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        poles, moved = step(poles, jnp.asarray(action)[None], keys)
        observation, reward, *_ = env.step(2 * action)
        total += reward
        np.testing.assert_allclose(moved.observation[0], observation, atol=1e-3)
        np.testing.assert_allclose(moved.reward[0], reward, atol=1e-2)
    np.testing.assert_allclose(moved.gained[0], total, rtol=1e-4)


def test_an_episode_that_time_cuts_begins_anew_in_the_same_step():
    keys = jax.random.split(jax.random.key(1), 3)
    poles = pendulum.reset(keys)._replace(age=jnp.array([0, 199, 5]))
    after, moved = step(poles, jnp.zeros((3, 1)), keys)
    np.testing.assert_array_equal(moved.ended, [False, True, False])
    np.testing.assert_array_equal(after.age, [1, 0, 6])
    assert not np.allclose(moved.observation[1], pendulum.observe(after)[1])
