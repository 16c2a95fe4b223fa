"""Densities of squashed actions, and what each loss moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sac import Sac
from tests.models.test_d4pg import rows_of

NET = Sac(action_size=2, hidden=16)
drawn = jax.jit(NET.drawn)


@pytest.fixture
def params(key):
    return NET.init(key, (3,))


def test_densities_of_one_dimension_have_the_mass_one(key):
    net = Sac(action_size=1, hidden=8)
    params = net.init(key, (3,))
    noise = jnp.linspace(-6, 6, 4001)[:, None]
    observation = jnp.zeros((4001, 3))
    action, log_density = net.drawn(params, observation, noise)
    mass = np.trapezoid(np.exp(log_density), action[:, 0])
    np.testing.assert_allclose(mass, 1.0, atol=1e-3)


def test_a_density_is_finite_where_an_action_rounds_to_one(params):
    action, log_density = drawn(params, jnp.zeros((2, 3)), jnp.full((2, 2), 40.0))
    np.testing.assert_array_equal(action, 1.0)
    assert np.isfinite(log_density).all()


@jax.jit
def losses(params, rows):
    keys = jax.random.split(jax.random.key(0), 5)
    return NET.losses(params, params, rows, keys)


@jax.jit
def gradient(params, rows):
    return jax.grad(lambda p: losses(p, rows).loss.sum())(params)


def test_critics_learn_from_their_error_and_the_policy_from_their_value(params, key):
    rows = rows_of(key)

    @jax.jit
    def of_critics(params):
        return jax.grad(lambda p: losses(p, rows).metrics["critic_loss"].sum())(params)

    both, critics = gradient(params, rows), of_critics(params)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731
    jax.tree.map(close, both["critics"], critics["critics"])
    assert not any(leaf.any() for leaf in jax.tree.leaves(critics["policy"]))
    assert any(leaf.any() for leaf in jax.tree.leaves(both["policy"]))


@pytest.mark.parametrize(("log_std", "sign"), [(-4.0, -1), (-0.3, 1)])
def test_the_temperature_rises_where_entropy_is_below_its_aim(
    params, log_std, sign, key
):
    bias = params["policy"]["out"]["bias"].at[2:].set(log_std)
    params["policy"]["out"]["bias"] = bias
    slope = gradient(params, rows_of(key))["log_temperature"]
    assert np.sign(slope) == sign  # descent raises it where the slope is below 0


def test_perceptrons_of_the_paper_are_not_normalised(key):
    net = Sac(action_size=2, hidden=16, is_normed=False)
    policy = jax.device_get(net.init(key, (3,))["policy"])
    x = np.asarray(jax.random.normal(key, (5, 3)))
    for layer in ("in", "hidden"):
        x = np.maximum(x @ policy[layer]["kernel"] + policy[layer]["bias"], 0)
    mean = (x @ policy["out"]["kernel"] + policy["out"]["bias"])[:, :2]
    found = net.best({"policy": policy}, jax.random.normal(key, (5, 3)))
    np.testing.assert_allclose(found, np.tanh(mean), rtol=1e-5)
