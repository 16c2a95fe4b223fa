"""A step of two players: law 1, who moves when, and what samplers are made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicator
from experiments.gan import Gan, images_of
from models import biggan
from models.gan_training import orthogonal_penalty
from replicator import strategies
from replicator.base.trees import named_leaves
from replicator.errors import ArgumentError, BatchError
from replicator.nnx import BatchNorm, SpectralNorm, params_of, with_params
from replicator.testing import assert_replica_invariant
from tests.steps import lenient, normals, replicas

LATENT, CLASSES, N = 6, 3, 16


class Generator(nnx.Module):
    """Two layers and a norm: all the kinds of state that one has."""

    def __init__(self, *, rngs, **norm):
        self.embed = nnx.Linear(CLASSES, 4, use_bias=False, rngs=rngs)
        self.first = SpectralNorm(nnx.Linear(LATENT + 4, 8, rngs=rngs), rngs=rngs)
        self.norm = BatchNorm(8, rngs=rngs, **norm)
        self.last = SpectralNorm(nnx.Linear(8, 4, rngs=rngs), rngs=rngs)

    def __call__(self, latents, labels):
        classes = self.embed(jax.nn.one_hot(labels, CLASSES, dtype=latents.dtype))
        x = self.first(jnp.concatenate([latents, classes], axis=1))
        return jnp.tanh(self.last(jax.nn.relu(self.norm(x)))).reshape(-1, 2, 2, 1)


class Discriminator(nnx.Module):
    def __init__(self, *, rngs):
        self.first = SpectralNorm(nnx.Linear(4 + CLASSES, 8, rngs=rngs), rngs=rngs)
        self.last = SpectralNorm(nnx.Linear(8, 1, rngs=rngs), rngs=rngs)

    def __call__(self, images, labels):
        classes = jax.nn.one_hot(labels, CLASSES, dtype=images.dtype)
        x = jnp.concatenate([images.reshape(-1, 4), classes], axis=1)
        return self.last(jax.nn.leaky_relu(self.first(x)))[:, 0]


def make_gan(rep=replicator, *, tx=None, norm=None, **choices):
    tx = tx or lenient(optax.adam(1e-2, b1=0.0))
    return Gan(
        **{
            "make_generator": functools.partial(Generator, **(norm or {})),
            "make_discriminator": Discriminator,
            "generator_tx": rep.wrap_optimizer(tx, name="generator"),
            "discriminator_tx": rep.wrap_optimizer(tx, name="discriminator"),
            "latent": LATENT,
            "num_classes": CLASSES,
            "decay": 0.9,
        }
        | choices
    )


def make_batch(resolution=2):
    labels = np.random.default_rng(0).integers(0, CLASSES, N, np.int32)
    shape = (N, resolution, resolution, 1)
    return {"image": np.asarray(normals(*shape, seed=1)), "label": labels}


@functools.cache
def stepped(*, orthogonal=0.0, step="step_fn", num_replicas=1, accumulate=1):
    """Return the state before and after a step of gradient descent, and its metrics."""
    rep = replicas(num_replicas)
    gan = make_gan(
        rep, tx=optax.sgd(0.1), norm={"stats_batch": 4}, orthogonal=orthogonal
    )
    state = rep.init(gan.init_fn)
    before = jax.device_get(state)
    compiled = rep.compile(getattr(gan, step), accumulate=accumulate)
    state, metrics = compiled(state, make_batch(), jax.random.key(0))
    return before, jax.device_get(state), metrics


def moved(before, after):
    """Return the names of leaves that are not what they were."""
    pairs = zip(named_leaves(before), named_leaves(after), strict=True)
    return {name for (name, old), (_, new) in pairs if not np.array_equal(old, new)}


def assert_law_1(gan, batch, **choices):
    report = assert_replica_invariant(gan.step_fn, gan.init_fn, batch, **choices)
    compared = {each.what for each in report.comparisons}
    assert {"gradient of `generator`", "gradient of `discriminator`"} < compared
    assert "float64 trajectory" in compared
    assert report.left_out == ()


@pytest.mark.slow
def test_a_step_is_the_same_on_eight_replicas_in_two_microbatches():
    one, many = (
        stepped(num_replicas=replicas, accumulate=accumulate)[1]
        for replicas, accumulate in ((1, 1), (8, 2))
    )
    # Parameters of both players, statistics and vectors, which move once, the average.
    for (name, leaf), (_, other) in zip(*map(named_leaves, (one, many)), strict=True):
        np.testing.assert_allclose(other, leaf, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_both_players_move_alike_at_any_cut_of_the_batch():
    gan = make_gan(norm={"stats_batch": 4}, orthogonal=1e-2)
    assert_law_1(
        gan, make_batch(), replicas=(1, 8), accumulate=(1, 2), at_steps=(0, 10)
    )


STRATEGIES = {
    "data_parallel": strategies.data_parallel,
    "zero1": strategies.zero1,
    "fsdp": strategies.fsdp,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        pytest.param("fsdp", (1,), marks=pytest.mark.nightly),
        pytest.param("data_parallel", (1, 2), marks=pytest.mark.nightly),
        pytest.param("zero1", (1,), marks=pytest.mark.nightly),
        pytest.param("zero1", (2,), marks=pytest.mark.nightly),
        pytest.param("fsdp", (2,), marks=pytest.mark.nightly),
    ],
)
def test_the_networks_of_the_paper_move_alike_however_their_state_lies(
    name, accumulate
):
    shape = {
        "resolution": 16,
        "num_classes": CLASSES,
        "channels": 1,
        "image_channels": 1,
        "attention": 8,
    }
    norm = functools.partial(BatchNorm, stats_batch=8)
    gan = make_gan(
        tx=lenient(optax.adam(1e-3, b1=0.0)),
        make_generator=functools.partial(
            biggan.Generator, latent=LATENT, shared=4, norm=norm, **shape
        ),
        make_discriminator=functools.partial(biggan.Discriminator, **shape),
        orthogonal=1e-4,
    )
    assert_law_1(
        gan,
        make_batch(16),
        replicas=(8,),
        accumulate=accumulate,
        at_steps=(0, 3),
        strategy=STRATEGIES[name](),
    )


def test_a_step_moves_both_players_and_the_average():
    before, after, metrics = stepped()
    # The score's bias moves where the hinge cuts; its vector has one value.
    still = {name for name, _ in named_leaves(before)} - moved(before, after)
    assert all(name.startswith("discriminator/last/") for name in still)
    assert set(metrics) == {"discriminator_loss", "generator_loss"}


def test_the_average_forgets_the_untrained_generator():
    before, after, _ = stepped()
    old, new, kept = (
        params_of(before["generator"]),
        params_of(after["generator"]),
        after["average"],
    )
    expected = jax.tree.map(lambda old, new: 0.1 * old + 0.9 * new, old, new)
    for found, wanted in zip(
        jax.tree.leaves(kept), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_step_of_the_critic_leaves_the_generator_alone():
    before, after, metrics = stepped(step="critic_step_fn")
    assert {name.partition("/")[0] for name in moved(before, after)} == {
        "discriminator"
    }
    assert set(metrics) == {"discriminator_loss"}


@pytest.mark.slow
def test_the_penalty_moves_the_generator_alone():
    (before, plain, _), (_, penalised, _) = stepped(), stepped(orthogonal=0.5)
    assert not moved(plain["discriminator"], penalised["discriminator"])

    def penalty(params):
        return orthogonal_penalty(with_params(before["generator"], params))

    expected = jax.grad(penalty)(params_of(before["generator"]))
    for name, gradient in named_leaves(expected):
        old, new = (
            dict(named_leaves(params_of(state["generator"])))[name]
            for state in (plain, penalised)
        )
        np.testing.assert_allclose(
            old - new, 0.1 * 0.5 * gradient, atol=1e-5, err_msg=name
        )


@pytest.fixture(scope="module")
def state():
    """A state whose average and statistics are not those that it starts with."""
    return stepped()[1]


def samplers(state, *, rep=None, truncations=(None,), global_batch=8, batches=3):
    rep = rep or replicas(8)
    return make_gan(rep).samplers(
        rep, state, truncations=truncations, batches=batches, global_batch=global_batch
    )


REPLICATORS = {
    "one": lambda: replicas(1),
    "eight": lambda: replicas(8),
    "fsdp": lambda: replicator.Replicator(
        strategy=strategies.fsdp(), compilation_cache=False
    ),
}


@pytest.mark.parametrize("name", REPLICATORS)
def test_standing_statistics_are_plain_means_over_batches(state, name):
    [found] = samplers(state, rep=REPLICATORS[name]())
    state = jax.tree.map(jnp.asarray, state)
    model = with_params(state["generator"], state["average"])
    model.norm.momentum = 0.0  # its statistics are those of the last batch
    seen = []
    for key in jax.random.split(jax.random.key(0), 3):
        model(*make_gan().draw(key, 8))
        seen.append([model.norm.mean[...], model.norm.var[...]])
    mean, var = np.mean(seen, axis=0)
    np.testing.assert_allclose(found.norm.mean[...], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.norm.var[...], var, rtol=1e-4, atol=1e-6)


def test_a_sampler_has_the_average_parameters(state):
    [found] = samplers(state)
    assert not moved(params_of(found), state["average"])


def test_statistics_are_those_of_what_is_sampled(state):
    whole, cut, again = samplers(state, truncations=(None, 0.5, None))
    assert cut.norm.var[...].sum() < 0.5 * whole.norm.var[...].sum()
    assert not moved(whole, again)


def test_the_state_that_samplers_are_made_of_stays(state):
    before = jax.tree.map(np.array, state)
    samplers(state)
    assert not moved(before, state)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"truncations": (None, -1.0)}, "`truncation` must be above 0"),
        ({"batches": 0}, "`batches` must be at least 1"),
        ({"global_batch": 12}, "`global_batch` must divide evenly over 8 replicas"),
    ],
)
def test_samplers_that_cannot_be_made_are_refused(state, choices, message):
    with pytest.raises((ArgumentError, BatchError), match=message):
        samplers(state, **choices)


def test_images_do_not_depend_on_what_they_are_drawn_with(state):
    [generator] = samplers(state)
    latents, labels = make_gan().draw(jax.random.key(1), 300)
    images = images_of(generator, latents, labels)
    assert (images.shape, images.dtype) == ((300, 2, 2, 1), np.float32)
    alone = images_of(generator, latents[290:], labels[290:])
    np.testing.assert_allclose(images[290:], alone, atol=1e-6)
