"""The loss of IMPALA: an actor and a critic that learn from what older policies did.

Espeholt et al. 2018, §4.1 and §4.2: V-trace corrects for the policy being newer than
the one that acted, by importance weights that are cut at 1. `rlax` does that. What the
losses of other actors and critics have in common with it is here, too.

Trajectories are those of the actors: T + 1 observations of each, T transitions, and an
environment that begins anew in the step after the last of an episode. That step is not
a transition: nothing is learned from it, and no value goes back through it.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from replicator import LocalSum, Mean

with warnings.catch_warnings():
    # rlax 0.1.9 imports distrax and that tensorflow_probability, which asks jax for
    # names that jax calls deprecated: a warning at import, of nothing that is used.
    warnings.simplefilter("ignore")
    import rlax


class Transitions(NamedTuple):
    """T steps of actors in b environments; `PyTree` of a trajectory.

    Attributes:
      action: What was done.
      reward: Of the transition that followed.
      discount: 0 where it ended the episode for good, 1 elsewhere.
      last: Whether an observation is the last of its episode.
      behaviour_logits: Of the policy that acted.
    """

    action: Int[Array, "b t"]
    reward: Float[Array, "b t"]
    discount: Float[Array, "b t"]
    last: Bool[Array, "b t1"]
    behaviour_logits: Float[Array, "b t actions"]


def transitions_of(trajectories: dict[str, PyTree]) -> Transitions:
    """Return what the loss needs of trajectories as actors make them."""
    return Transitions(
        trajectories["action"],
        trajectories["reward"],
        trajectories["discount"],
        trajectories["last"],
        trajectories["extras"]["logits"],
    )


def vtrace_loss(
    logits: Float[Array, "b t1 actions"],
    value: Float[Array, "b t1"],
    done: Transitions,
    *,
    discount: float = 0.99,
    entropy_cost: float = 0.01,
    baseline_cost: float = 0.5,
) -> tuple[LocalSum, dict[str, Mean]]:
    """Sum the loss over this replica's transitions.

    Args:
      logits: Of the policy that learns, at all t + 1 observations.
      value: Its estimates there.
      done: What was done, in t steps.
      discount: Per step, on top of that of the environment.
      entropy_cost: Weight of the entropy, which keeps the policy from choosing early.
      baseline_cost: Weight of half the squared error of the values.

    Returns:
      The sum over transitions and their number, for `replicator.value_and_grad`; and
      metrics, each a mean over transitions: `policy_loss`, `baseline_loss`, `entropy`,
      `importance` (the ratio before the cut; 1 where the policy is the one that acted).

    >>> done = Transitions(
    ...     jnp.zeros((1, 2), int), jnp.ones((1, 2)), jnp.ones((1, 2)),
    ...     jnp.zeros((1, 3), bool), jnp.zeros((1, 2, 4)))
    >>> loss, metrics = vtrace_loss(jnp.zeros((1, 3, 4)), jnp.zeros((1, 3)), done)
    >>> float(loss.count), round(float(metrics["entropy"].value), 4)
    (2.0, 1.3863)
    """
    mask = is_transition(done)
    log_taken = log_probability(logits[:, :-1], done.action)
    log_acted = log_probability(done.behaviour_logits, done.action)
    ratio = jnp.exp(jax.lax.stop_gradient(log_taken) - log_acted)

    with jax.numpy_dtype_promotion("standard"):  # rlax multiplies floats by flags
        vtrace = jax.vmap(rlax.vtrace_td_error_and_advantage)(
            value[:, :-1],
            value[:, 1:],
            done.reward,
            discount * done.discount,
            # 0 where the step is not a transition: its error is 0, and none of the next
            # episode goes through. A truncated episode ends with its last value, so.
            ratio * mask,
        )
    metrics = {
        "policy_loss": -log_taken * jax.lax.stop_gradient(vtrace.pg_advantage),
        "baseline_loss": 0.5 * jnp.square(vtrace.errors),
        "entropy": entropy(logits[:, :-1]),
        "importance": ratio,
    }
    costs = {"entropy_cost": entropy_cost, "baseline_cost": baseline_cost}
    return actor_critic_loss(metrics, mask, **costs)


def actor_critic_loss(
    metrics: dict[str, Float[Array, "b t"]],
    mask: Float[Array, "b t"],
    *,
    entropy_cost: float,
    baseline_cost: float,
) -> tuple[LocalSum, dict[str, Mean]]:
    """Sum over transitions what a policy, its values and its entropy cost.

    Args:
      metrics: Of each step: `policy_loss`, `baseline_loss` and `entropy`, which are the
        loss, and others that are only shown.
      mask: As of `is_transition`.
      entropy_cost: Weight of the entropy.
      baseline_cost: Weight of the values' loss.

    Returns:
      As of `vtrace_loss`.
    """
    each = (
        metrics["policy_loss"]
        + baseline_cost * metrics["baseline_loss"]
        - entropy_cost * metrics["entropy"]
    )
    count = mask.sum()
    return LocalSum((mask * each).sum(), count), {
        name: Mean((mask * per_step).sum() / jnp.maximum(count, 1.0), weight=count)
        for name, per_step in metrics.items()
    }


def entropy(logits: Float[Array, "b t actions"]) -> Float[Array, "b t"]:
    """Return that of each step's policy."""
    log_policy = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)


def is_transition(done: Transitions) -> Float[Array, "b t"]:
    """Return 1 for each step that is a transition, 0 between two episodes."""
    return 1.0 - done.last[:, :-1].astype(jnp.float32)


def log_probability(
    logits: Float[Array, "b t actions"], action: Int[Array, "b t"]
) -> Float[Array, "b t"]:
    """Return that of each action that was taken, of unnormalised logits."""
    log_policy = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_policy, action[..., None], axis=-1)[..., 0]
