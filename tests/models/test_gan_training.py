"""Latents by their place in the global batch, and the penalty against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.biggan import Generator
from models.gan_training import draw, hinge_losses, orthogonal_penalty
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.errors import ArgumentError
from replicator.nnx import SpectralNorm, params_of
from tests.helpers import on_replicas
from tests.steps import normals

N = 16


def drawn(n=N, **choices):
    return draw(jax.random.key(0), n, **{"latent": 5, "num_classes": 3} | choices)


def drawn_in_parts(num_replicas, accumulate):
    """Return the global batch that replicas and microbatches draw together."""
    each = N // num_replicas // accumulate
    parts = []
    for index in range(accumulate):
        position = Microbatch(index=index, count=accumulate)

        def fn(row, position=position):
            with in_microbatch(position):
                return drawn(each)

        parts.append(on_replicas(fn, jnp.zeros(num_replicas), n=num_replicas))
    # [microbatches, replicas, each, ...]
    return [
        np.stack(part).reshape(N, *part[0].shape[2:])
        for part in zip(*parts, strict=True)
    ]


def test_each_example_has_its_latent_at_any_cut_of_the_batch():
    found = drawn_in_parts(num_replicas=8, accumulate=2)
    for part, whole in zip(found, drawn(), strict=True):
        # Compilers round the last digit of a normal draw as they like.
        np.testing.assert_allclose(part, whole, rtol=1e-6)


def test_latents_are_normal_and_classes_equally_likely():
    latents, labels = drawn(3000)
    assert (latents.dtype, labels.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_allclose([latents.mean(), latents.std()], [0, 1], atol=0.03)
    np.testing.assert_allclose(np.bincount(labels) / 3000, 1 / 3, atol=0.03)


@pytest.mark.parametrize("truncation", [2.0, 0.5])
def test_truncation_bounds_latents(truncation):
    latents, _ = drawn(1000, truncation=truncation)
    assert 0.95 * truncation < jnp.abs(latents).max() <= truncation


def test_truncation_leaves_the_classes():
    np.testing.assert_array_equal(drawn(truncation=0.5)[1], drawn()[1])


@pytest.mark.parametrize("truncation", [0.0, -1.0, float("inf"), float("nan")])
def test_a_truncation_out_of_its_range_is_refused(truncation):
    with pytest.raises(ArgumentError) as error:
        drawn(truncation=truncation)
    assert str(error.value) == (
        f"`truncation` must be above 0 and finite, got {truncation}. Use 0.5 for "
        "images of the best quality, None for all that the generator can draw."
    )


def test_a_pair_on_the_right_sides_of_the_hinge_has_no_loss():
    real, fake = jnp.array([2.0, 0.5, -1.0]), jnp.array([-3.0, 0.0, 1.0])
    np.testing.assert_allclose(hinge_losses(real, fake), [0, 1.5, 4])


class Layers(nnx.Module):
    """A normed convolution, a plain layer, and an embedding."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = SpectralNorm(nnx.Conv(2, 4, (3, 3), rngs=rngs), rngs=rngs)
        self.dense = nnx.Linear(5, 3, rngs=rngs)
        self.embed = nnx.Linear(6, 2, rngs=rngs)
        self.conv.layer.kernel.set_value(normals(3, 3, 2, 4, seed=1))
        self.dense.kernel.set_value(normals(5, 3, seed=2))


def test_the_penalty_is_that_of_the_paper_without_the_shared_embedding():
    model = Layers()
    expected = 0.0
    for kernel in (model.conv.layer.kernel[...], model.dense.kernel[...]):
        matrix = np.reshape(kernel, (-1, kernel.shape[-1]))
        between = matrix.T @ matrix * (1 - np.eye(matrix.shape[1]))
        expected += np.linalg.norm(between) ** 2
    np.testing.assert_allclose(orthogonal_penalty(model), expected, rtol=1e-5)


def test_filters_at_right_angles_cost_nothing():
    model = Layers()
    for layer in (model.conv.layer, model.dense):
        start = jax.nn.initializers.orthogonal()
        layer.kernel.set_value(start(jax.random.key(0), layer.kernel.shape))
    assert abs(orthogonal_penalty(model)) < 1e-6


def test_a_generator_keeps_its_shared_embedding_where_the_penalty_looks():
    shapes = {"resolution": 16, "num_classes": 3, "channels": 1, "latent": 6}
    model = nnx.eval_shape(lambda: Generator(**shapes, rngs=nnx.Rngs(0)))
    assert params_of(model)["embed"]["kernel"].shape == (3, 128)
