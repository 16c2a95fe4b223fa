"""Values of actions: what is learned of a row, and who explores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.dqn import Dqn
from models.impala import ActorCritic
from replicator.errors import ArgumentError

NET = Dqn(network=ActorCritic(num_actions=3, torso="mlp", hidden=8))


def rows_of(key, n=5):
    keys = jax.random.split(key, 2)
    return {
        "observation": jax.random.normal(keys[0], (n, 4)),
        "next_observation": jax.random.normal(keys[1], (n, 4)),
        "action": jnp.arange(n, dtype=jnp.int32) % 3,
        "reward": jnp.linspace(-3.0, 3.0, n),
        "discount": jnp.array([0.9, 0.9, 0.0, 0.9, 0.9]),
    }


def test_the_error_is_that_of_double_q_learning(key):
    params, target = (NET.init(each, (4,)) for each in jax.random.split(key))
    rows = rows_of(key)
    values = jax.jit(NET.values)
    before, after = (rows[name] for name in ("observation", "next_observation"))
    here, chosen, valued = (
        values(params, before),
        values(params, after),
        values(target, after),
    )
    found = jax.jit(NET.losses)(params, target, rows, key)
    found = jax.device_get(found)
    here, chosen, valued, rows = jax.device_get((here, chosen, valued, rows))
    for i in range(5):
        aim = rows["reward"][i] + rows["discount"][i] * valued[i][chosen[i].argmax()]
        error = abs(float(aim - here[i][rows["action"][i]]))
        huber = 0.5 * error**2 if error < 1 else error - 0.5
        np.testing.assert_allclose(found.priority[i], error, atol=1e-5)
        np.testing.assert_allclose(found.loss[i], huber, atol=1e-5)
    assert {bool(each) for each in found.priority < 1} == {True, False}


def test_the_target_does_not_learn(key):
    params = NET.init(key, (4,))
    loss = lambda target: NET.losses(params, target, rows_of(key), key).loss.sum()  # noqa: E731
    slope = jax.jit(jax.grad(loss))(params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(slope))


def test_each_environment_has_its_epsilon():
    found = NET.epsilons(8)
    due = [0.4 ** (1 + 7 * i / 7) for i in range(8)]
    np.testing.assert_allclose(found, due, rtol=1e-5)
    np.testing.assert_allclose(NET.epsilons(1), 0.4**4.5, rtol=1e-5)


@pytest.mark.parametrize(("epsilon", "actions"), [(0.0, {1}), (1.0, {0, 1, 2})])
def test_an_action_is_the_best_or_any(epsilon, actions, key):
    net = Dqn(network=NET.network, epsilon=epsilon, alpha=0.0)
    params = net.init(key, (4,))
    params["policy"]["bias"] = jnp.array([0.0, 9.0, 0.0])
    n = 64
    given = (params, jnp.zeros((n, 4)), jnp.ones(n, bool), (), key)
    action, extras, _ = jax.jit(net.act)(*given)
    assert set(np.asarray(action).tolist()) == actions
    assert (action.dtype, extras) == (jnp.int32, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 1.5}, "`epsilon` must be from 0 to 1, got 1.5"),
        ({"network": ActorCritic(num_actions=3, lstm=4)}, "`network` must have no mem"),
    ],
)
def test_what_cannot_learn_is_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        Dqn(**{"network": NET.network, **given})
