"""Dtypes in which numbers are added, and in which they are sent.

float16 overflows at 65,504: a sum of eight gradients may be infinite where their mean
is small. Such narrow floats are added, and sent to be added, in float32. bfloat16 has
the range of float32, so it travels as it is; sums on one device are float32 anyway.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which one device adds: float32 at least for floats.

    >>> sum_dtype(jnp.bfloat16), sum_dtype(jnp.int8)
    (dtype('float32'), dtype('int8'))
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits >= 32:
        return dtype
    return jnp.dtype(jnp.float32)


def wire_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which devices add: float32 for floats of a small range.

    >>> wire_dtype(jnp.float16), wire_dtype(jnp.bfloat16)
    (dtype('float32'), dtype(bfloat16))
    """
    dtype = jnp.dtype(dtype)
    return dtype if dtype == jnp.bfloat16 else sum_dtype(dtype)


def on_wire(leaf: Array) -> Array:
    """Return `leaf` in the dtype in which devices add it."""
    return leaf.astype(wire_dtype(leaf.dtype))


def like_leaf(result: Array, leaf: Array) -> Array:
    """Return `result` in the dtype of `leaf`."""
    return result if result.dtype == leaf.dtype else result.astype(leaf.dtype)


def move(leaf: Array, send: Callable[[Array], Array]) -> Array:
    """Return `send(leaf)`, which moves values, so that cotangents add as on the wire.

    Args:
      leaf: Any array.
      send: A linear function, for any dtype; its transpose may add over replicas.
    """
    if wire_dtype(leaf.dtype) == leaf.dtype:
        return send(leaf)
    moved = jax.custom_jvp(send)

    @moved.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return moved(*primals), send(on_wire(tangents[0])).astype(leaf.dtype)

    return moved(leaf)
