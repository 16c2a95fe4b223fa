import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from models.losses import Transitions, vtrace_loss
from replicator.testing import assert_replica_invariant
from tests.steps import apply, trainer

ACTIONS = 3


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def vtrace_of_one_episode(value, reward, discount, ratio):
    """Equation (1) of the paper, as a sum; value has one more entry than the others."""
    steps = len(reward)
    rho = c = np.minimum(1.0, ratio)
    target = np.array(value[:steps])
    for s in range(steps):
        for t in range(s, steps):
            delta = rho[t] * (reward[t] + discount[t] * value[t + 1] - value[t])
            target[s] += np.prod(discount[s:t]) * np.prod(c[s:t]) * delta
    after = np.append(target[1:], value[steps])
    return target, rho * (reward + discount * after - value[:steps])


def loss_by_hand(logits, value, done, *, discount, entropy_cost, baseline_cost):
    """Cut trajectories where episodes end, and add up those pieces."""
    total, count = 0.0, 0
    for b in range(len(value)):
        starts = [0, *(np.flatnonzero(done.last[b, :-1]) + 1)]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            # The observations of a piece; its transitions are one fewer.
            end = len(value[b]) if end is None else end
            steps = slice(start, end - 1)
            action = done.action[b, steps]
            policy = softmax(logits[b, steps])
            taken = policy[np.arange(len(action)), action]
            acted = softmax(done.behaviour_logits[b, steps])
            target, advantage = vtrace_of_one_episode(
                value[b, start:end],
                done.reward[b, steps],
                discount * done.discount[b, steps],
                taken / acted[np.arange(len(action)), action],
            )
            total += np.sum(-np.log(taken) * advantage)
            total += baseline_cost * 0.5 * np.sum((target - value[b, steps]) ** 2)
            total += entropy_cost * np.sum(policy * np.log(policy))
            count += len(action)
    return total, count


def made_up(b=8, t=7, seed=0):
    """Logits, values, and transitions of `b` trajectories with ends in them."""
    rng = np.random.default_rng(seed)
    last = rng.random((b, t + 1)) < 0.3
    terminated = last & (rng.random((b, t + 1)) < 0.5)
    made = (
        rng.normal(size=(b, t + 1, ACTIONS)).astype(np.float32),
        rng.normal(size=(b, t + 1)).astype(np.float32),
        Transitions(
            action=rng.integers(ACTIONS, size=(b, t)).astype(np.int32),
            reward=rng.normal(size=(b, t)).astype(np.float32),
            discount=np.where(terminated[:, 1:], 0, 1).astype(np.float32),
            last=last,
            behaviour_logits=rng.normal(size=(b, t, ACTIONS)).astype(np.float32),
        ),
    )
    return jax.tree.map(jnp.asarray, made)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_papers_equation_on_each_episode(seed):
    costs = {"discount": 0.9, "entropy_cost": 0.02, "baseline_cost": 0.7}
    made = made_up(seed=seed)
    found, _ = vtrace_loss(*made, **costs)
    expected, count = loss_by_hand(*jax.tree.map(np.asarray, made), **costs)
    assert float(found.count) == count
    np.testing.assert_allclose(found.value, expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_transition_changes_nothing():
    logits, value, done = made_up()
    ignored = done.last[:, :-1]
    other = done._replace(
        reward=jnp.where(ignored, 9.0, done.reward),
        action=jnp.where(ignored, 0, done.action),
        discount=jnp.where(ignored, 0.5, done.discount),
    )
    gradient = jax.grad(
        lambda x, done: vtrace_loss(x[0], x[1], done)[0].value  # type: ignore
    )
    for found, expected in zip(
        gradient((logits, value), other), gradient((logits, value), done), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_metrics_are_means_over_transitions():
    logits, value, done = made_up()
    even = jnp.zeros_like(logits)
    _, metrics = vtrace_loss(even, value, done._replace(behaviour_logits=even[:, :-1]))
    np.testing.assert_allclose(metrics["entropy"].value, np.log(ACTIONS), rtol=1e-6)
    np.testing.assert_allclose(metrics["importance"].value, 1.0, rtol=1e-6)
    assert float(metrics["entropy"].weight) == int(jnp.sum(~done.last[:, :-1]))


def test_gradients_agree_on_any_number_of_replicas():
    optimizer = replicator.wrap_optimizer(optax.sgd(1e-3))
    *_, done = made_up()
    batch = {
        "observation": np.random.default_rng(1).normal(size=(8, 8, 5)).astype("f4"),
        "done": done._asdict(),
    }

    def loss_fn(params, batch):
        y = batch["observation"] @ params
        return vtrace_loss(
            y[..., :ACTIONS], y[..., ACTIONS], Transitions(**batch["done"])
        )

    def step_fn(state, batch):
        (loss, metrics), grads = replicator.value_and_grad(loss_fn, has_aux=True)(
            state["params"], batch
        )
        after = apply(optimizer, state, grads, count=loss.weight)
        return after, {"loss": loss, **metrics}

    init_fn, _ = trainer(
        optimizer, init_params=lambda key: jax.random.normal(key, (5, ACTIONS + 1))
    )
    assert_replica_invariant(step_fn, init_fn, batch, accumulate=(1,), at_steps=(0, 2))
