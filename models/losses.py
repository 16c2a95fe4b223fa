"""The loss of IMPALA: an actor and a critic that learn from what older policies did.

Espeholt et al. 2018, §4.1 and §4.2: V-trace corrects for the policy being newer than
the one that acted, by importance weights that are cut at 1. `rlax` does that.

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
    """What actors did in T steps of b environments; `PyTree` of a trajectory.

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
    mask = 1.0 - done.last[:, :-1].astype(jnp.float32)
    log_policy = jax.nn.log_softmax(logits[:, :-1])
    log_behaviour = jax.nn.log_softmax(done.behaviour_logits)
    log_taken = _at(log_policy, done.action)
    ratio = jnp.exp(jax.lax.stop_gradient(log_taken) - _at(log_behaviour, done.action))

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
    advantage = jax.lax.stop_gradient(vtrace.pg_advantage)
    entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)
    policy_loss = -log_taken * advantage
    baseline_loss = 0.5 * jnp.square(vtrace.errors)
    each = policy_loss + baseline_cost * baseline_loss - entropy_cost * entropy

    count = mask.sum()
    metrics = {
        "policy_loss": policy_loss,
        "baseline_loss": baseline_loss,
        "entropy": entropy,
        "importance": ratio,
    }
    return LocalSum((mask * each).sum(), count), {
        name: Mean((mask * per_step).sum() / jnp.maximum(count, 1.0), weight=count)
        for name, per_step in metrics.items()
    }


def _at(
    values: Float[Array, "b t actions"], action: Int[Array, "b t"]
) -> Float[Array, "b t"]:
    return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]
