"""The critic of distributions: what its target is, and what each loss moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.d4pg import D4pg
from replicator.errors import ArgumentError

NET = D4pg(action_size=2, v_min=-1.0, v_max=3.0, atoms=9, hidden=16)
critic, target = jax.jit(NET.critic), jax.jit(NET._target)


@pytest.fixture
def params(key):
    return NET.init(key, (3,))


def rows_of(key, n=5, **leaves):
    keys = jax.random.split(key, 3)
    return {
        "observation": jax.random.normal(keys[0], (n, 3)),
        "next_observation": jax.random.normal(keys[1], (n, 3)),
        "action": jnp.tanh(jax.random.normal(keys[2], (n, 2))),
        "reward": jnp.linspace(-0.5, 0.5, n),
        "discount": jnp.full(n, 0.9),
        **leaves,
    }


def plain_projection(reward, discount, masses, support):
    """Share each moved atom between its neighbours, one by one."""
    found, gap = np.zeros_like(support), support[1] - support[0]
    for mass, atom in zip(masses, support, strict=True):
        place = (np.clip(reward + discount * atom, support[0], support[-1])) - support[
            0
        ]
        low = min(int(np.floor(place / gap + 1e-9)), len(support) - 2)
        share = place / gap - low
        found[low] += mass * (1 - share)
        found[low + 1] += mass * share
    return found


@pytest.mark.parametrize("reward", [0.0, 0.5, -1.0, 0.3, 40.0, -40.0])
@pytest.mark.parametrize("discount", [0.0, 1.0, 0.95])
def test_the_target_is_that_of_a_plain_loop(params, key, reward, discount):
    rows = rows_of(key, 1, reward=jnp.array([reward]), discount=jnp.array([discount]))
    after = rows["next_observation"]
    masses = jax.nn.softmax(critic(params, after, NET.best(params, after)))
    found = target(params, rows)[0]
    due = plain_projection(
        reward, discount, *map(np.asarray, (masses[0], NET.support()))
    )
    np.testing.assert_allclose(found, due, atol=2e-6)
    np.testing.assert_allclose(found.sum(), 1.0, atol=2e-6)


@jax.jit
def losses(params, rows):
    return NET.losses(params, params, rows, jax.random.key(0))


def test_the_policy_follows_the_value_and_the_critic_its_target_alone(params, key):
    rows = rows_of(key)

    @jax.jit
    def gradients(params):
        return (
            jax.grad(lambda p: losses(p, rows).loss.sum())(params),
            jax.grad(lambda p: losses(p, rows).metrics["policy_value"].sum())(params),
            jax.grad(lambda p: losses(p, rows).metrics["critic_loss"].sum())(params),
        )

    both, ascent, descent = gradients(params)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731
    jax.tree.map(lambda a, b: close(a, -b), both["policy"], ascent["policy"])
    jax.tree.map(close, both["critic"], descent["critic"])
    assert not any(leaf.any() for leaf in jax.tree.leaves(descent["policy"]))


def test_a_priority_is_zero_where_nothing_is_left_to_learn(params, key):
    rows = rows_of(key)
    rows |= {"next_observation": rows["observation"]}
    rows |= {"action": NET.best(params, rows["observation"])}
    known = rows | {"reward": jnp.zeros(5), "discount": jnp.ones(5)}
    assert losses(params, known).priority.max() < 1e-5
    assert losses(params, rows).priority.min() > 1e-3


def test_environments_explore_apart(params):
    first, same = jnp.ones(4, bool), jnp.zeros((4, 3))
    action, extras, _ = jax.jit(NET.act)(params, same, first, (), jax.random.key(1))
    assert len(np.unique(np.asarray(action), axis=0)) == 4
    assert float(jnp.abs(action).max()) <= 1
    assert extras == {}


def test_one_environment_alone_explores_by_another_share_at_each_step(params):
    given, shares = (jnp.zeros((1, 3)), jnp.zeros(1, bool), ()), set()
    for key in jax.random.split(jax.random.key(0), 8):
        action, *_ = NET.act(params, *given, key)
        noise = NET.noise * jax.random.normal(key, (1, 2))
        at = jnp.abs(noise[0]).argmin()  # not clipped
        share = ((action - NET.best(params, given[0])) / noise)[0, at]
        shares.add(round(float(share), 3))
    assert len(shares) == 8
    assert min(shares) > 0.49
    assert max(shares) < 1.51


def test_returns_that_are_none_are_refused():
    with pytest.raises(ArgumentError, match="`v_max` must be above `v_min`"):
        D4pg(action_size=1, v_min=1.0, v_max=1.0)
