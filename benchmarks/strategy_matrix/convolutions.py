"""Patterns of grouped convolutions, by name; see `writes.py`.

The array is the kernel, [9, features], of images that the batch holds: what a vmapped
gradient makes of it are convolutions in groups of examples or features.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.strategy_matrix.writes import Pattern

_IMAGES = ("NHWC", "HWIO", "NHWC")


def _images(u: Array) -> Array:
    """Return each row as an image of four by four, of two channels."""
    return u[:, :32].reshape(-1, 4, 4, 2)


def _kernel(x: Array) -> Array:
    """Return the array as kernels of three by three, of two channels."""
    return x.reshape(3, 3, 2, -1)


def convolve(images: Array, kernel: Array, **how: int | tuple[int, ...]) -> Array:
    """Convolve [n, h, w, c] with [h, w, c, features]."""
    settings = {"window_strides": (1, 1), "padding": "SAME", **how}
    return lax.conv_general_dilated(
        images, kernel, dimension_numbers=_IMAGES, **settings
    )


def _loss(kernel: Array, image: Array) -> Array:
    return jnp.square(jnp.tanh(convolve(image[None], kernel))).sum()


def _of_each(x: Array, u: Array) -> Array:
    return jax.vmap(jax.grad(_loss), (None, 0))(_kernel(x), _images(u))


def _flat(gradients: Array) -> Array:
    """Return gradients of kernels in the shape of the array."""
    return gradients.reshape(*gradients.shape[:-4], 18, -1)


def _clipped(x: Array, u: Array) -> Array:
    """Clip each example's gradient before their mean, as DP-SGD does."""
    each = _of_each(x, u)
    norm = jnp.sqrt(jnp.square(each).sum((1, 2, 3, 4), keepdims=True))
    return _flat((each * jnp.minimum(1.0, 2.0 / norm)).mean(0))


def _deep(x: Array, u: Array) -> Array:
    """Take each example's gradient of a kernel that is behind another convolution."""
    fixed = jnp.cos(jnp.arange(36.0)).reshape(3, 3, 2, 2)

    def loss(kernel: Array, image: Array) -> Array:
        return _loss(kernel, jnp.tanh(convolve(image[None], fixed))[0])

    return _flat(jax.vmap(jax.grad(loss), (None, 0))(_kernel(x), _images(u)))


def _strided(kernel: Array, image: Array) -> Array:
    y = convolve(image[None], kernel, window_strides=(2, 2), rhs_dilation=(2, 1))
    return jnp.square(jnp.tanh(y)).sum()


def _own_kernels(x: Array, u: Array) -> Array:
    """Convolve each example with a kernel of its own."""
    own = _kernel(x)[None] * jnp.cos(u[:, :1, None, None, None])
    return jax.vmap(lambda image, k: convolve(image[None], k))(_images(u), own)


def _jacobian(x: Array, u: Array) -> Array:
    def means(kernel: Array, image: Array) -> Array:
        return jnp.tanh(convolve(image[None], kernel)).mean((0, 1, 2))[:3]

    return _flat(jax.vmap(jax.jacrev(means), (None, 0))(_kernel(x), _images(u)))


def _causal(x: Array, u: Array) -> Array:
    """Convolve sixteen places in time, each feature by itself."""
    return lax.conv_general_dilated(
        u[:, :32].reshape(-1, 16, 2),
        x.reshape(9, 1, -1)[:4],
        (1,),
        [(3, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=2,
    )


CONVOLUTIONS: Mapping[str, Mapping[str, Pattern]] = {
    "of-each": {
        "each": lambda x, u: _flat(_of_each(x, u)),
        "each-norm": lambda x, u: jnp.square(_of_each(x, u)).sum((1, 2, 3, 4)),
        "clipped": _clipped,
        "fisher": lambda x, u: _flat(jnp.square(_of_each(x, u)).mean(0)),
        "deep": _deep,
        "each-strided": lambda x, u: _flat(
            jax.vmap(jax.grad(_strided), (None, 0))(_kernel(x), _images(u)).mean(0)
        ),
        "jacobian": _jacobian,
    },
    "grouped": {
        "plain": lambda x, u: convolve(_images(u), _kernel(x)),
        "depthwise": lambda x, u: convolve(
            _images(u), x.reshape(3, 3, 1, -1), feature_group_count=2
        ),
        "batch-groups": lambda x, u: convolve(
            _images(u), _kernel(x), batch_group_count=2
        ),
        "ensemble": lambda x, u: jax.vmap(convolve, (None, 3))(
            _images(u), x.reshape(3, 3, 2, 2, -1)
        ),
        "own-kernels": _own_kernels,
        "transposed": lambda x, u: lax.conv_transpose(
            _images(u), _kernel(x), (2, 2), "SAME", dimension_numbers=_IMAGES
        ),
        "causal": _causal,
    },
}
"""By group and name."""
