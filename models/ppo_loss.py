"""The loss of PPO: an actor and a critic that learn from a batch more than once.

Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7 and 9, with the
advantages of Schulman et al. 2016, "High-dimensional continuous control using
generalized advantage estimation", eq. 16.

Trajectories are those of the actors, as in `models.losses`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.losses import (
    Transitions,
    actor_critic_loss,
    entropy,
    is_transition,
    log_probability,
)
from replicator import LocalSum, Mean, all_reduce


class Steps(NamedTuple):
    """Inputs of the loss, for each step of b environments.

    Attributes:
      action: What was done.
      log_taken: Its log-probability, of the policy that acted.
      advantage: How much better than expected it was, of mean 0 and variance 1.
      target: Of the value.
      mask: As of `is_transition`.
    """

    action: Int[Array, "b t"]
    log_taken: Float[Array, "b t"]
    advantage: Float[Array, "b t"]
    target: Float[Array, "b t"]
    mask: Float[Array, "b t"]


def steps_of(
    value: Float[Array, "b t1"],
    done: Transitions,
    *,
    discount: float = 0.99,
    trace: float = 0.95,
) -> Steps:
    """Return what to learn from transitions.

    Advantages are whitened over the transitions of all replicas.

    Args:
      value: Estimates at all t + 1 observations, before anything is learned.
      done: What was done, in t steps.
      discount: Per step, on top of that of the environment.
      trace: The share of each later error that counts ("lambda").

    >>> done = Transitions(
    ...     jnp.zeros((1, 2), int), jnp.ones((1, 2)), jnp.ones((1, 2)),
    ...     jnp.zeros((1, 3), bool), jnp.zeros((1, 2, 4)))
    >>> steps_of(jnp.zeros((1, 3)), done, discount=1.0, trace=1.0).target.tolist()
    [[2.0, 1.0]]
    """
    mask = is_transition(done)
    after = discount * done.discount
    # 0 between two episodes: none of the next goes through. An episode that was cut
    # ends with its last value.
    error = mask * (done.reward + after * value[:, 1:] - value[:, :-1])

    def back(later: Array, step: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        error, after, mask = step
        advantage = error + trace * after * mask * later
        return advantage, advantage

    rows = (error.T, after.T, mask.T)
    _, advantage = jax.lax.scan(back, jnp.zeros(len(value)), rows, reverse=True)
    advantage = advantage.T
    return Steps(
        action=done.action,
        log_taken=log_probability(done.behaviour_logits, done.action),
        advantage=_whitened(advantage, mask),
        target=advantage + value[:, :-1],
        mask=mask,
    )


def ppo_loss(
    logits: Float[Array, "b t actions"],
    value: Float[Array, "b t"],
    steps: Steps,
    *,
    clip: float = 0.2,
    entropy_cost: float = 0.01,
    baseline_cost: float = 0.5,
) -> tuple[LocalSum, dict[str, Mean]]:
    """Sum the loss over this replica's transitions.

    Args:
      logits: Of the policy that learns, where actions were taken.
      value: Its estimates there.
      steps: What is learned from.
      clip: How far a probability may move, as a share, before its gradient ends.
      entropy_cost: Weight of the entropy, which keeps the policy from choosing early.
      baseline_cost: Weight of half the squared error of the values.

    Returns:
      As of `vtrace_loss`, with `clipped` (the share whose gradient has ended) instead
      of `importance`.
    """
    ratio = jnp.exp(log_probability(logits, steps.action) - steps.log_taken)
    near = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
    gain = jnp.minimum(ratio * steps.advantage, near * steps.advantage)
    metrics = {
        "policy_loss": -gain,
        "baseline_loss": 0.5 * jnp.square(value - steps.target),
        "entropy": entropy(logits),
        "clipped": (gain < ratio * steps.advantage).astype(jnp.float32),
    }
    costs = {"entropy_cost": entropy_cost, "baseline_cost": baseline_cost}
    return actor_critic_loss(metrics, steps.mask, **costs)


def _whitened(
    values: Float[Array, "b t"], mask: Float[Array, "b t"]
) -> Float[Array, "b t"]:
    def mean(values: Array) -> Array:
        total, count = all_reduce(((mask * values).sum(), mask.sum()), op="sum")
        return total / jnp.maximum(count, 1.0)

    centred = values - mean(values)
    return mask * centred / jnp.sqrt(mean(jnp.square(centred)) + 1e-8)
