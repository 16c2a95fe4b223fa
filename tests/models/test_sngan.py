"""The networks of the batch study."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gan_layers import ConditionalNorm
from models.sngan import Discriminator, Generator
from replicator.errors import ArgumentError
from replicator.nnx import BatchNorm, SpectralNorm

SHAPE = {"num_classes": 3, "channels": 4, "image_channels": 1}


def generator(resolution=8, **options):
    shape = SHAPE | {"latent": 5, "resolution": resolution} | options
    return Generator(**shape, rngs=nnx.Rngs(0))


def discriminator(resolution=8, **options):
    return Discriminator(**SHAPE | options, resolution=resolution, rngs=nnx.Rngs(0))


def drawn(model, latents, labels):
    return nnx.clone(model)(latents, labels)


def instances(model, kind):
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, kind)]


@pytest.mark.parametrize("resolution", [8, 16, 64])
def test_images_have_the_resolution(resolution):
    model = nnx.eval_shape(lambda: generator(resolution))
    images = jax.eval_shape(drawn, model, jnp.zeros((2, 5)), jnp.zeros((2,), jnp.int32))
    assert images.shape == (2, resolution, resolution, 1)


@pytest.mark.parametrize("resolution", [8, 16, 64])
def test_an_image_has_a_score(resolution):
    model = nnx.eval_shape(lambda: discriminator(resolution))
    images = jnp.zeros((2, resolution, resolution, 1))
    scores = jax.eval_shape(drawn, model, images, jnp.zeros((2,), jnp.int32))
    assert (scores.shape, scores.dtype) == ((2,), jnp.float32)


def test_networks_for_32_pixels_are_as_deep_as_the_papers():
    player = nnx.eval_shape(lambda: generator(32))
    judge = nnx.eval_shape(lambda: discriminator(32))
    assert len(player.blocks) == 3
    assert [block.halves for block in judge.blocks] == [True, True, False, False]


def test_networks_have_one_width():
    models = nnx.eval_shape(lambda: (generator(32), discriminator(32)))
    widths = {
        leaf.shape[-1] for model in models for leaf in jax.tree.leaves(model.blocks)
    }
    assert widths == {SHAPE["channels"]}


def test_only_weights_of_the_discriminator_are_divided_by_their_spectral_norms():
    player, judge = nnx.eval_shape(lambda: (generator(), discriminator()))
    assert not instances(player, SpectralNorm)
    layers = instances(judge, nnx.Conv | nnx.Linear)
    assert len(instances(judge, SpectralNorm)) == len(layers)


def test_norms_take_the_statistics_that_the_user_chose():
    norm = functools.partial(BatchNorm, stats=2)
    model = nnx.eval_shape(lambda: generator(16, norm=norm))
    assert len(instances(model, ConditionalNorm)) == 4
    assert [each.stats for each in instances(model, BatchNorm)] == [2] * 5


def test_half_precision_keeps_parameters_and_images_in_single():
    options = {"compute_dtype": jnp.bfloat16}
    models = nnx.eval_shape(lambda: (generator(**options), discriminator(**options)))
    player, judge = models
    labels = jnp.zeros((2,), jnp.int32)
    images = jax.eval_shape(drawn, player, jnp.zeros((2, 5)), labels)
    scores = jax.eval_shape(drawn, judge, images, labels)
    assert (images.dtype, scores.dtype) == (jnp.float32, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(models)} == {jnp.dtype("float32")}


def test_a_class_changes_the_image_and_the_score(key):
    player, judge = generator(), discriminator()
    latents = jnp.tile(jax.random.normal(key, (1, 5)), (3, 1))
    labels = jnp.arange(3)
    player.eval()
    judge.eval()
    images = jax.jit(drawn)(player, latents, labels)
    scores = jax.jit(drawn)(judge, jnp.tile(images[:1], (3, 1, 1, 1)), labels)
    assert np.abs(images).max() < 1
    assert len(np.unique(images, axis=0)) == 3
    assert len(np.unique(scores)) == 3


@pytest.mark.parametrize("resolution", [4, 12, 0, -8])
@pytest.mark.parametrize("make", [generator, discriminator])
def test_another_resolution_is_refused(make, resolution):
    with pytest.raises(ArgumentError) as error:
        make(resolution)
    assert str(error.value) == (
        "`resolution` must be 8, 16, 32 or another power of 2 from 8 on, got "
        f"{resolution}. Resize the images."
    )


@pytest.mark.parametrize("make", [generator, discriminator])
def test_no_classes_are_refused(make):
    with pytest.raises(ArgumentError, match="`num_classes` must be at least 1, got 0"):
        make(num_classes=0)
