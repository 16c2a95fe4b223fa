"""Narrow forms of float32 numbers: bfloat16, float16, and int8 with a scale a block.

Bits travel as integers: a CPU would send bfloat16 as float32. NaN and infinity come
back as what is not finite, so that a check of the sum finds them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from replicator.collectives.synchronise.method import BLOCK, piece_of

_FLOATS = {"bf16": jnp.dtype(jnp.bfloat16), "f16": jnp.dtype(jnp.float16)}
_LARGEST = 127


def encode(values: Float[Array, "rows n"], form: str) -> Integer[Array, "rows bytes"]:
    """Return numbers in a narrow form, a row after the other.

    Args:
      values: Numbers in float32 or float64.
      form: `"bf16"`, `"f16"` or `"int8"`.

    >>> encode(jnp.array([[1.0, 2.0]]), "bf16").dtype
    dtype('uint16')
    """
    if form != "int8":
        return lax.bitcast_convert_type(_rounded(values, _FLOATS[form]), jnp.uint16)
    blocks = _in_blocks(values)
    scales = (jnp.abs(blocks).max(axis=2) / _LARGEST).astype(jnp.float32)
    # A block that holds NaN or infinity is zero times NaN. (XLA's maximum on a CPU does
    # not pass on every NaN.)
    scales = jnp.where(jnp.isfinite(blocks).all(axis=2), scales, jnp.nan)
    usable = jnp.isfinite(scales) & (scales > 0)
    by = jnp.where(usable, scales, 1).astype(values.dtype)[:, :, None]
    steps = jnp.round(jnp.where(usable[:, :, None], blocks / by, 0))
    numbers = jnp.clip(steps, -_LARGEST, _LARGEST).astype(jnp.int8)
    rows, size = values.shape
    flat = numbers.reshape(rows, -1)[:, :size]
    as_bytes = lax.bitcast_convert_type(scales, jnp.int8).reshape(rows, -1)
    return jnp.concatenate([flat, as_bytes], axis=1)


def decode(
    sent: Integer[Array, "rows bytes"], form: str, size: int, dtype: jnp.dtype
) -> Float[Array, "rows n"]:
    """Return the numbers behind a narrow form.

    Args:
      sent: Result of `encode`.
      form: As there.
      size: Number of numbers in a row.
      dtype: Dtype of the numbers, float32 or float64.

    >>> numbers = jnp.array([[1.0, -3.0, 0.0]])
    >>> decode(encode(numbers, "int8"), "int8", 3, numbers.dtype)[0, 1]
    Array(-3., dtype=float32)
    """
    if form != "int8":
        return lax.bitcast_convert_type(sent, _FLOATS[form]).astype(dtype)
    rows = sent.shape[0]
    scales = lax.bitcast_convert_type(
        sent[:, size:].reshape(rows, -1, 4), jnp.float32
    ).astype(dtype)
    numbers = _in_blocks(sent[:, :size].astype(dtype))
    return (numbers * scales[:, :, None]).reshape(rows, -1)[:, :size]


def _rounded(values: jax.Array, narrow: jnp.dtype) -> jax.Array:
    # What is too large is the largest, and the rest is owed; infinity stays.
    most = float(jnp.finfo(narrow).max)
    clipped = jnp.where(jnp.isinf(values), values, jnp.clip(values, -most, most))
    return clipped.astype(narrow)


def _in_blocks(values: Float[Array, "rows n"]) -> Float[Array, "rows blocks block"]:
    rows, size = values.shape
    blocks = piece_of(size, BLOCK)
    padded = jnp.pad(values, ((0, 0), (0, blocks * BLOCK - size)))
    return padded.reshape(rows, blocks, BLOCK)
