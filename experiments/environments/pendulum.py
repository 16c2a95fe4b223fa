"""A pendulum in JAX: swing a pole up and keep it there, by the rules of `Pendulum-v1`.

Gymnasium's task, whose torques of ±2 are actions in [-1, 1] here: a reward from about
-16 to 0 for each of 200 steps, then the episode is cut by time. Many at once run in a
compiled step that acts and learns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

STEPS = 200  # of an episode
OBSERVATION = (3,)  # cosine and sine of the angle, its speed
ACTION_SIZE = 1
REWARDS = (-(jnp.pi**2 + 6.4 + 0.004), 0.0)
_TORQUE, _SPEED, _SECONDS, _GRAVITY = 2.0, 8.0, 0.05, 10.0


class Poles(NamedTuple):
    """n pendulums.

    Attributes:
      angle: From upright, float32 [n].
      speed: Of the angle, float32 [n].
      age: Steps taken in the episode, int32 [n].
      gained: Rewards of the episode so far, float32 [n].
    """

    angle: Array
    speed: Array
    age: Array
    gained: Array


class Moved(NamedTuple):
    """A step of n pendulums.

    Attributes:
      reward: float32 [n].
      observation: After it, and before the next episode: float32 [n, 3].
      ended: Whether time has cut the episode, bool [n].
      gained: Rewards of the episode, float32 [n].
    """

    reward: Array
    observation: Array
    ended: Array
    gained: Array


def reset(keys: Array) -> Poles:
    """Begin an episode of each of n pendulums, at places that the keys [n] choose."""

    def draw(key: Array) -> Array:
        return jax.random.uniform(key, (2,), minval=-1.0)

    angle, speed = jax.vmap(draw, out_axes=1)(keys)
    none = jnp.zeros_like(angle)
    return Poles(angle * jnp.pi, speed, none.astype(jnp.int32), none)


def observe(poles: Poles) -> Array:
    """Return what an agent sees, float32 [n, 3]."""
    parts = jnp.cos(poles.angle), jnp.sin(poles.angle), poles.speed
    return jnp.stack(parts, axis=-1)


def step(poles: Poles, action: Array, keys: Array) -> tuple[Poles, Moved]:
    """Take a step of each; one that has ended begins anew, within the same step.

    Args:
      poles: Before.
      action: float32 [n, 1], in [-1, 1].
      keys: Random keys [n], of new episodes.

    Returns:
      The pendulums after, and what happened.
    """
    torque = _TORQUE * action[:, 0]
    angle = (poles.angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    cost = angle**2 + 0.1 * poles.speed**2 + 0.001 * torque**2
    pull = 1.5 * _GRAVITY * jnp.sin(poles.angle) + 3.0 * torque
    speed = jnp.clip(poles.speed + pull * _SECONDS, -_SPEED, _SPEED)
    moved = Poles(
        poles.angle + speed * _SECONDS, speed, poles.age + 1, poles.gained - cost
    )
    ended = moved.age == STEPS
    after = jax.tree.map(
        lambda new, old: jnp.where(ended, new, old), reset(keys), moved
    )
    return after, Moved(-cost, observe(moved), ended, moved.gained)
