import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.impala import ActorCritic
from replicator.errors import ArgumentError


def abstract(**kwargs):
    """Shapes of a network that is never computed."""
    net = ActorCritic(num_actions=6, **kwargs)
    return jax.eval_shape(lambda key: net.init(key, (84, 84, 4)), jax.random.key(0))


# Worked out by hand from figure 3, for frames of 84 × 84 × 4 and six actions.
@pytest.mark.parametrize(
    ("torso", "lstm", "expected"),
    [("shallow", 0, 677_943), ("deep", 0, 1_091_031), ("shallow", 256, 1_203_255)],
)
def test_parameters_are_those_of_the_figure(torso, lstm, expected):
    shapes = jax.tree.leaves(abstract(torso=torso, lstm=lstm))
    assert sum(leaf.size for leaf in shapes) == expected


def trajectories(key, shape, b=3, t=5):
    observation = jax.random.randint(key, (b, t, *shape), 0, 256).astype(jnp.uint8)
    first = jax.random.bernoulli(key, 0.3, (b, t))
    return observation, first


@pytest.mark.parametrize(
    ("torso", "shape"),
    [("mlp", (4, 3)), ("shallow", (20, 20, 2)), ("deep", (8, 8, 1))],
)
@pytest.mark.parametrize("lstm", [0, 7])
def test_what_acts_is_what_learns(torso, shape, lstm, key):
    net = ActorCritic(num_actions=3, torso=torso, hidden=8, lstm=lstm)
    params = net.init(key, shape)
    observation, first = trajectories(key, shape)
    core = net.initial_core(3)
    learned = jax.jit(net.unroll)(params, observation, first, core)
    step = jax.jit(net.step)
    for t in range(5):
        acted, core = step(params, observation[:, t], first[:, t], core)
        np.testing.assert_allclose(acted.logits, learned.logits[:, t], atol=1e-5)
        np.testing.assert_allclose(acted.value, learned.value[:, t], atol=1e-4)


def test_memory_is_emptied_where_an_episode_begins(key):
    net = ActorCritic(num_actions=3, torso="mlp", hidden=8, lstm=4)
    params = net.init(key, (5,))
    observation = jax.random.normal(key, (2, 5))
    heads = [
        net.step(params, observation, jnp.array(first), (old, old))[0].value
        for old in (jnp.zeros((2, 4)), jnp.ones((2, 4)))
        for first in ([True, False],)
    ]
    assert heads[0][0] == heads[1][0]
    assert heads[0][1] != heads[1][1]


def test_convolving_in_chunks_changes_nothing(key):
    whole = ActorCritic(num_actions=3, hidden=8)
    params = whole.init(key, (20, 20, 2))
    observation, first = trajectories(key, (20, 20, 2))
    chunks = ActorCritic(num_actions=3, hidden=8, chunk=4)
    for found, expected in zip(
        jax.jit(chunks.unroll)(params, observation, first, ()),
        jax.jit(whole.unroll)(params, observation, first, ()),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_actions_are_drawn_from_the_logits(key):
    net = ActorCritic(num_actions=3, torso="mlp", hidden=8)
    params = net.init(key, (1,))
    params["policy"]["bias"] = jnp.log(jnp.array([0.2, 0.7, 0.1]))
    observation = jnp.zeros((4000, 1))
    action, extras, _ = net.act(params, observation, jnp.ones(4000, bool), (), key)
    assert action.dtype == jnp.int32
    np.testing.assert_allclose(np.bincount(action) / 4000, [0.2, 0.7, 0.1], atol=0.03)
    np.testing.assert_allclose(
        jax.nn.softmax(extras["logits"][0]), [0.2, 0.7, 0.1], atol=1e-6
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"torso": "wide"},
            "`torso` must be one of ['deep', 'mlp', 'shallow'], got 'wide'. "
            "Use 'mlp' for what is no image.",
        ),
        ({"lstm": -1}, "`lstm` must be at least 0, got -1. Use 0."),
        ({"hidden": 0}, "`hidden` must be at least 1, got 0. Use 1."),
    ],
)
def test_an_unknown_network_is_refused(given, message):
    with pytest.raises(ArgumentError) as error:
        ActorCritic(num_actions=3, **given)
    assert str(error.value) == message
