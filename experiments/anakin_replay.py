"""An agent with a replay memory, in one compiled step: act, keep, sample, learn.

Each replica has its share of pendulums and of the memory, explores each of them by
itself, and draws its share of each sample from its own rows: nothing but gradients goes
from one to another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import replicator
from experiments.environments import pendulum
from experiments.off_policy import OffPolicy
from experiments.returns import Learned

_UNSEEN = 1 << 20  # folded into the keys of episodes that nobody learned from
_LEARNED = ("params", "target", "opt")


def make_step(
    agent: OffPolicy,
    *,
    replicas: int,
    environments: int,
    unroll_length: int,
    capacity: int,
    batch_size: int,
    updates: int,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `init_fn` and `step_fn` of `anakin.learn`.

    Args:
      agent: Acts and learns.
      replicas: That share all of what follows.
      environments: Pendulums.
      unroll_length: Steps of each in a call.
      capacity: Rows of the memory; the oldest go.
      batch_size: Rows of an update.
      updates: In a call.
    """
    own = environments // replicas
    made = own * unroll_length
    rows = capacity // replicas // made * made  # whole calls
    sizes = {"size": batch_size // replicas, "updates": updates}

    def init_fn(key: Array) -> dict[str, Any]:
        # The same for all replicas; the first call begins, on each its own.
        poles = pendulum.reset(jax.random.split(key, own))
        replayed = replicator.PerReplica((poles, _empty(agent, poles, rows)))
        return {**agent.init_fn(key), "replayed": replayed, "calls": jnp.zeros((), int)}

    def step_fn(
        state: dict[str, Any], numbers: Array, key: Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        act_key, draw_key, learn_key = jax.random.split(key, 3)
        act_key, start_key = jax.random.split(replicator.replica_key(act_key))
        poles, memory = state["replayed"].value
        begun = pendulum.reset(jax.random.split(start_key, len(numbers)))
        poles = jax.tree.map(
            lambda new, old: jnp.where(state["calls"] == 0, new, old), begun, poles
        )
        steps = state["calls"] * unroll_length + jnp.arange(unroll_length)
        poles, new, moved = play(agent, state["params"], poles, act_key, steps)
        memory = _overwritten(memory, new, at=(state["calls"] * made) % rows)
        held = jnp.minimum((state["calls"] + 1) * made, rows)
        learned = {name: state[name] for name in _LEARNED}
        keys = (replicator.replica_key(draw_key), learn_key)
        learned, metrics = _learn(agent, learned, memory, keys, held=held, **sizes)
        metrics["gained"] = replicator.PerReplica(moved.gained)
        metrics["ended"] = replicator.PerReplica(moved.ended)
        replayed = replicator.PerReplica((poles, memory))
        return {**learned, "replayed": replayed, "calls": state["calls"] + 1}, metrics

    return init_fn, step_fn


def play(
    agent: OffPolicy, params: Any, poles: pendulum.Poles, key: Array, steps: Array
) -> tuple[pendulum.Poles, dict[str, Array], pendulum.Moved]:
    """Return the pendulums after some steps, rows of transitions, and what happened."""
    size = len(poles.age)

    def one(poles: pendulum.Poles, step: Array) -> tuple[pendulum.Poles, Any]:
        act_key, reset_key = jax.random.split(jax.random.fold_in(key, step))
        seen = pendulum.observe(poles)
        given = ({"params": params}, seen, jnp.zeros(size, bool), (), act_key)
        action, *_ = agent.policy(*given, steps=step)
        poles, moved = pendulum.step(poles, action, jax.random.split(reset_key, size))
        row = _rows(agent, seen, action, moved.reward)
        return poles, (row | {"next_observation": moved.observation}, moved)

    poles, (rows, moved) = jax.lax.scan(one, poles, steps)
    return (
        poles,
        jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows),
        moved,
    )


def evaluated(
    agent: OffPolicy, outcomes: dict[int, Learned], *, episodes: int
) -> list[float]:
    """Return the mean return of so many episodes without exploration, of each seed."""

    @jax.jit
    def returned(params: Any, key: Array) -> Array:
        keys = jax.random.split(key, episodes)

        def one(poles: pendulum.Poles, _: None) -> tuple[pendulum.Poles, Array]:
            action = agent.net.best(params, pendulum.observe(poles))
            poles, moved = pendulum.step(poles, action, keys)
            return poles, moved.reward

        _, rewards = jax.lax.scan(
            one, pendulum.reset(keys), None, length=pendulum.STEPS
        )
        return rewards.sum(axis=0).mean()

    return [
        float(returned(found.params, jax.random.fold_in(jax.random.key(seed), _UNSEEN)))
        for seed, found in outcomes.items()
    ]


def _empty(agent: OffPolicy, poles: pendulum.Poles, rows: int) -> dict[str, Any]:
    """Return a memory of so many rows."""
    action = jnp.zeros((len(poles.age), 1))
    row = _rows(agent, pendulum.observe(poles), action, poles.gained)
    return jax.tree.map(
        lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), row
    )


def _overwritten(memory: Any, new: Any, *, at: Array) -> Any:
    """Return a memory with new rows at a place."""
    return jax.tree.map(
        lambda old, leaf: jax.lax.dynamic_update_slice_in_dim(old, leaf, at, 0),
        memory,
        new,
    )


def _learn(
    agent: OffPolicy,
    learned: dict[str, Any],
    memory: Any,
    keys: tuple[Array, Array],
    *,
    held: Array,
    size: int,
    updates: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is learned from samples of the rows held, and the last's metrics."""

    def update(learned: dict[str, Any], number: Array) -> tuple[Any, Any]:
        draw_key, learn_key = (jax.random.fold_in(key, number) for key in keys)
        place = jax.random.randint(draw_key, (size,), 0, held)
        batch = {
            "trajectories": jax.tree.map(lambda leaf: leaf[place], memory),
            "probability": jnp.ones(size),
        }
        learned, metrics = agent.step_fn(learned, batch, learn_key)
        del metrics["priority"]  # all rows are drawn alike
        return learned, metrics

    learned, metrics = jax.lax.scan(update, learned, jnp.arange(updates))
    return learned, jax.tree.map(lambda leaf: leaf[-1], metrics)


def _rows(
    agent: OffPolicy, seen: Array, action: Array, reward: Array
) -> dict[str, Any]:
    """Return rows as `n_step` makes them of one step: no episode terminates."""
    return {
        "observation": seen,
        "action": action,
        "reward": reward,
        "discount": jnp.full(reward.shape, agent.discount),
        "next_observation": seen,
        "extras": {},
    }
