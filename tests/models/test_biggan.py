"""BigGAN's networks: shapes, parameters of the paper, and what an image depends on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.biggan import Discriminator, Generator
from models.gan_layers import Attention, Layers
from replicator.errors import ArgumentError
from replicator.nnx import SpectralNorm
from tests.steps import normals

TINY = {"resolution": 16, "num_classes": 3, "channels": 2, "image_channels": 1}
LATENT = {"latent": 6, "shared": 4}


def abstract(network, **choices):
    """Shapes of a network that is never computed."""
    return nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0), **choices))


def parameters(network):
    leaves = jax.tree.leaves(nnx.state(network, nnx.Param))
    return sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize(
    ("resolution", "latent"),
    [
        (16, 6),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((32, 8), (64, 10), (128, 12), (256, 14))
        ),
    ],
)
def test_images_have_the_resolution_and_a_score_each(resolution, latent):
    choices = {"resolution": resolution, "num_classes": 3, "channels": 2}
    choices["attention"] = min(64, resolution // 2)

    def images_and_scores():
        rngs, labels = nnx.Rngs(0), jnp.zeros(2, jnp.int32)
        generator = Generator(latent=latent, rngs=rngs, **choices)
        images = generator(jnp.zeros((2, latent)), labels)
        return images, Discriminator(rngs=rngs, **choices)(images, labels)

    images, scores = jax.eval_shape(images_and_scores)
    assert (images.shape, images.dtype) == ((2, resolution, resolution, 3), jnp.float32)
    assert (scores.shape, scores.dtype) == ((2,), jnp.float32)


@pytest.mark.parametrize(
    ("network", "expected"), [(Generator, 70_433_988), (Discriminator, 87_982_370)]
)
def test_parameters_are_as_many_as_published(network, expected):
    # Brock et al. 2018, table 1: 158.3 million in both.
    paper = {"resolution": 128, "num_classes": 1000, "channels": 96, "attention": 64}
    assert parameters(abstract(network, **paper)) == expected


def test_every_weight_but_the_shared_embedding_is_divided_by_its_norm():
    generator = abstract(Generator, attention=8, **TINY, **LATENT)
    discriminator = abstract(Discriminator, attention=8, **TINY)
    for network, plain in ((generator, ["embed"]), (discriminator, [])):
        normed = {
            id(module.layer)
            for _, module in nnx.iter_modules(network)
            if isinstance(module, SpectralNorm)
        }
        layers = {
            id(module): "/".join(map(str, path))
            for path, module in nnx.iter_modules(network)
            if isinstance(module, nnx.Linear | nnx.Conv)
        }
        assert [path for each, path in layers.items() if each not in normed] == plain


@functools.cache
def generator(**choices):
    """An untrained generator that samples."""
    model = Generator(**TINY, **LATENT, **choices, rngs=nnx.Rngs(0))
    model.eval()
    return model


@jax.jit
def drawn(model, latents, labels):
    return nnx.clone(model)(latents, labels)


@pytest.fixture
def orders():
    """Latents and labels of three images."""
    return normals(3, 6, seed=1), jnp.arange(3, dtype=jnp.int32)


def test_pixels_are_within_1(orders):
    images = drawn(generator(), 100 * orders[0], orders[1])
    assert 0.1 < jnp.abs(images).max() <= 1


def test_each_class_changes_the_image(orders):
    latents = jnp.broadcast_to(orders[0][:1], (3, 6))
    images = drawn(generator(), latents, orders[1])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert jnp.abs(images[one] - images[other]).max() > 1e-4


@pytest.mark.parametrize("part", [0, 1, 2])
def test_each_part_of_the_latent_changes_the_image(orders, part):
    latents, labels = orders
    moved = latents.at[:, 2 * part : 2 * part + 2].add(1)
    before, after = (drawn(generator(), each, labels) for each in (latents, moved))
    assert jnp.abs(after - before).max(axis=(1, 2, 3)).min() > 1e-4


@functools.cache
def discriminator(**choices):
    model = Discriminator(**TINY, **choices, rngs=nnx.Rngs(0))
    model.eval()
    return model


def test_a_score_depends_on_the_class():
    images = jnp.broadcast_to(normals(1, 16, 16, 1, seed=3), (3, 16, 16, 1))
    scores = drawn(discriminator(), images, jnp.arange(3))
    assert len(np.unique(scores.round(4))) == 3


def test_half_precision_draws_and_scores_about_the_same(orders):
    half = {"compute_dtype": jnp.bfloat16}
    images = [drawn(generator(**each), *orders) for each in ({}, half)]
    scores = [drawn(discriminator(**each), images[0], orders[1]) for each in ({}, half)]
    for single, other in (images, scores):
        assert (single.dtype, other.dtype) == (jnp.float32, jnp.float32)
        error = np.linalg.norm(other - single) / np.linalg.norm(single)
        assert 1e-5 < error < 0.05
    for model in (generator(**half), discriminator(**half)):
        assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.float32.dtype}


def test_attention_at_first_leaves_its_input():
    attention = Attention(8, layers=Layers(nnx.Rngs(0)))
    x = normals(2, 4, 4, 8, seed=1)
    np.testing.assert_array_equal(attention(x), x)


def test_attention_lets_each_place_take_in_every_other():
    attention = Attention(8, layers=Layers(nnx.Rngs(0)))
    attention.strength.set_value(jnp.ones(()))
    attention.eval()
    x = normals(1, 4, 4, 8, seed=1)
    moved = x.at[:, 3, 3].add(3)
    change = jnp.abs(attention(moved) - attention(x)).max(axis=-1)
    assert change.min() > 1e-4


def test_attention_is_the_softmax_of_the_paper_also_in_float64():
    attention = Attention(8, layers=Layers(nnx.Rngs(0), spectral=False))
    attention.strength.set_value(jnp.full((), 0.5))
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 8))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), attention)
        y = np.asarray(wide(jnp.asarray(x)))

    def applied(layer, rows):
        return rows @ np.asarray(layer.kernel[0, 0], np.float64)

    def pooled(rows):
        return rows.reshape(2, 2, 2, 2, -1).max(axis=(1, 3)).reshape(4, -1)

    query = applied(attention.query, x[0]).reshape(16, -1)
    key, value = (
        pooled(applied(layer, x[0])) for layer in (attention.key, attention.value)
    )
    weights = np.exp(query @ key.T)
    mean = weights @ value / weights.sum(axis=1, keepdims=True)
    expected = x[0] + 0.5 * applied(attention.out, mean).reshape(4, 4, -1)
    np.testing.assert_allclose(y[0], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"resolution": 24},
            "`resolution` must be one of [16, 32, 64, 128, 256], got 24. Resize the "
            "images.",
        ),
        (
            {"latent": 8},
            "`latent` must be a multiple of 3 at 16 pixels, a part for each block and "
            "one for the first features, got 8. Use 9.",
        ),
        (
            {"attention": 4},
            "`attention` must be None or one of [8, 16], the heights of features, got "
            "4. Use 16.",
        ),
        (
            {"num_classes": 0},
            "`num_classes` must be at least 1, got 0. Use 1.",
        ),
    ],
)
def test_a_network_that_does_not_fit_is_refused(choices, message):
    with pytest.raises(ArgumentError) as error:
        Generator(**TINY | LATENT | choices, rngs=nnx.Rngs(0))
    assert str(error.value) == message


@pytest.mark.parametrize("choices", [{"resolution": 24}, {"attention": 16}])
def test_a_discriminator_that_does_not_fit_is_refused(choices):
    [name] = choices
    with pytest.raises(ArgumentError, match=f"`{name}` must be"):
        Discriminator(**TINY | choices, rngs=nnx.Rngs(0))
