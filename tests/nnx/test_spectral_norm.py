"""Spectral norms against singular values of NumPy, and their vector against updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from replicator.errors import ArgumentError
from replicator.nnx import SpectralNorm, params_of, value_and_grad, with_params
from tests.steps import normals, replicas

LAYERS = {
    "linear": lambda rngs: nnx.Linear(3, 4, rngs=rngs),
    "conv": lambda rngs: nnx.Conv(2, 4, (3, 3), rngs=rngs),
}
INPUTS = {"linear": (5, 3), "conv": (5, 4, 4, 2)}


def normed(name="linear"):
    """Return a norm around a layer, and inputs for it."""
    norm = SpectralNorm(LAYERS[name](nnx.Rngs(0)), rngs=nnx.Rngs(1))
    norm.layer.kernel.set_value(normals(*norm.layer.kernel.shape, seed=2))
    norm.layer.bias.set_value(normals(4, seed=3))
    return norm, normals(*INPUTS[name], seed=4)


def largest_singular_value(kernel):
    matrix = np.reshape(kernel, (-1, kernel.shape[-1]))
    return np.linalg.norm(matrix, 2)


@jax.jit
def called(norm, x):
    """Return the outputs, and the norm as the call left it."""
    norm = nnx.clone(norm)
    y = norm(x)
    return y, norm


def called_often(norm, x, times=100):
    for _ in range(times):
        y, norm = called(norm, x)
    return y, norm


@pytest.mark.parametrize("name", LAYERS)
def test_after_many_calls_the_kernel_is_divided_by_its_largest_singular_value(name):
    norm, x = normed(name)
    y, _ = called_often(norm, x)
    layer = nnx.clone(norm.layer)
    kernel = norm.layer.kernel[...]
    layer.kernel.set_value(kernel / largest_singular_value(kernel))
    np.testing.assert_allclose(y, layer(x), rtol=1e-4, atol=1e-5)


def test_one_call_agrees_with_the_norm_of_flax():
    norm, x = normed()
    theirs = nnx.SpectralNorm(nnx.clone(norm.layer), rngs=nnx.Rngs(2))
    [u] = [name for name in theirs.batch_stats if name[-1] == "u"]
    theirs.batch_stats[u].set_value(norm.vector[...][None])
    np.testing.assert_allclose(norm(x), theirs(x), rtol=1e-5)
    np.testing.assert_allclose(norm.vector[...], theirs.batch_stats[u][0], rtol=1e-5)


def test_gradients_take_the_vectors_as_constants():
    norm, x = normed()
    kernel = norm.layer.kernel[...]
    left = kernel @ norm.vector[...]
    left /= jnp.linalg.norm(left)
    right = left @ kernel
    right /= jnp.linalg.norm(right)

    def expected_loss(kernel):
        return jnp.square(
            x @ (kernel / (left @ kernel @ right)) + norm.layer.bias[...][None]
        ).sum()

    def loss(norm):
        return jnp.square(norm(x)).sum()

    _, grads = value_and_grad(loss)(norm)
    np.testing.assert_allclose(
        grads["layer"]["kernel"], jax.grad(expected_loss)(kernel), rtol=1e-4, atol=1e-5
    )


def test_the_kernel_in_the_layer_stays():
    norm, x = normed()
    before = np.asarray(norm.layer.kernel[...])
    norm(x)
    np.testing.assert_array_equal(norm.layer.kernel[...], before)


def test_the_vector_moves_in_training_alone():
    norm, x = normed()
    first = np.asarray(norm.vector[...])
    norm.eval()
    norm(x)
    np.testing.assert_array_equal(norm.vector[...], first)
    norm.train()
    norm(x)
    assert not np.allclose(norm.vector[...], first)
    np.testing.assert_allclose(jnp.linalg.norm(norm.vector[...]), 1, rtol=1e-6)


def test_a_kernel_of_zeros_has_outputs_and_gradients():
    norm, x = normed()
    norm.layer.kernel.set_value(jnp.zeros((3, 4)))
    (loss, norm), grads = value_and_grad(lambda norm: jnp.square(norm(x)).sum())(norm)
    expected = 5 * jnp.square(norm.layer.bias[...]).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    expected = 2 * x.sum(axis=0)[:, None] * norm.layer.bias[...][None]
    np.testing.assert_allclose(grads["layer"]["kernel"], expected, rtol=1e-5)


def test_a_kernel_that_was_zero_is_divided_again():
    norm, x = normed()
    kernel = norm.layer.kernel[...]
    norm.layer.kernel.set_value(jnp.zeros((3, 4)))
    _, norm = called(norm, x)
    norm.layer.kernel.set_value(kernel)
    y, _ = called_often(norm, x)
    expected = x @ (kernel / largest_singular_value(kernel))
    bias = norm.layer.bias[...][None]
    np.testing.assert_allclose(y, expected + bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1e-16, 1e-8, 1e8])
def test_a_kernel_of_any_size_gets_no_singular_value_above_1(size):
    norm, _ = normed()
    norm.layer.bias.set_value(jnp.zeros(4))
    norm.layer.kernel.set_value(norm.layer.kernel[...] * size)
    matrix, _ = called_often(norm, jnp.eye(3))
    assert largest_singular_value(matrix) <= 1 + 1e-5


def test_activations_in_half_precision_leave_the_vector_in_single():
    single, x = normed("conv")
    half = nnx.clone(single)
    half.layer.dtype = jnp.bfloat16
    y = half(x)
    assert (y.dtype, half.vector[...].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(y.astype(jnp.float32), single(x), atol=0.05)
    np.testing.assert_array_equal(half.vector[...], single.vector[...])


def test_a_frozen_norm_may_be_closed_over():
    norm, x = normed()
    norm.eval()
    np.testing.assert_allclose(jax.jit(lambda x: norm(x))(x), norm(x), rtol=1e-5)


def loss_fn(norm, batch):
    return jnp.square(norm(batch)).mean()


@functools.cache
def after_one_update(accumulate):
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        norm, _ = normed()
        return {"norm": norm, "opt": optimizer.init(params_of(norm))}

    def step_fn(state, batch):
        (loss, norm), grads = value_and_grad(loss_fn)(state["norm"], batch)
        params = params_of(norm)
        updates, opt = optimizer.update(grads, state["opt"], params)
        norm = with_params(norm, optax.apply_updates(params, updates))
        return {"norm": norm, "opt": opt}, {"loss": loss}

    step = rep.compile(step_fn, accumulate=accumulate)
    state, _ = step(rep.init(init_fn), np.asarray(normals(8, 3, seed=4)))
    return jax.device_get(state["norm"])


def test_under_accumulation_the_vector_moves_once_per_update():
    one, two = after_one_update(1), after_one_update(2)
    np.testing.assert_allclose(two.vector[...], one.vector[...], rtol=1e-6)
    np.testing.assert_allclose(
        two.layer.kernel[...], one.layer.kernel[...], rtol=1e-5, atol=1e-6
    )
    norm, x = normed()
    norm(x)
    np.testing.assert_allclose(one.vector[...], norm.vector[...], rtol=1e-5)


def test_a_layer_without_a_kernel_is_refused():
    with pytest.raises(ArgumentError) as error:
        SpectralNorm(nnx.Embed(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert str(error.value) == (
        "`layer` must have a parameter `kernel`, got `Embed`. Use `nnx.Linear` on "
        "one-hot labels in the place of `nnx.Embed`."
    )
