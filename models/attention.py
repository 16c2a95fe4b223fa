"""Attention in which a token sees itself and those before it.

Vaswani et al. 2017, "Attention is all you need", §3.2.1.
"""

import math
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from replicator.errors import ArgumentError, check_word

Attention: TypeAlias = Literal["xla", "blocks", "cudnn"]
"""Kernels of attention."""

_BLOCK = 512
"""Queries of a block."""

_HALF = (jnp.bfloat16, jnp.float16)


def fastest_attention(compute_dtype: DTypeLike | None) -> Attention:
    """Return the kernel to take on the devices that JAX uses by default.

    cuDNN's takes heads whose size is a multiple of 8, of at most 128.

    >>> fastest_attention(jnp.float32)
    'xla'
    """
    # "8.0" and more since Ampere; of other makers' it is a name, or not there.
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    is_new = capability[:1].isdigit() and float(capability) >= 8
    return "cudnn" if is_new and compute_dtype in _HALF else "xla"


def check_attention(attention: str, compute_dtype: DTypeLike | None) -> None:
    """Raise if there is no such kernel, or none for that dtype.

    Raises:
      ArgumentError: There is none.

    >>> check_attention("xla", None)
    """
    check_word("attention", attention, get_args(Attention))
    if attention == "cudnn" and compute_dtype not in _HALF:
        raise ArgumentError(
            "`attention` must not be 'cudnn' unless `compute_dtype` is bfloat16 or "
            f"float16, got 'cudnn' and {compute_dtype}. Pass "
            "`compute_dtype=jnp.bfloat16`."
        )


def attend(
    query: Float[Array, "batch time heads size"],
    key: Float[Array, "batch time kv_heads size"],
    value: Float[Array, "batch time kv_heads size"],
    *,
    kernel: Attention = "xla",
) -> Float[Array, "batch time heads size"]:
    """Return for each token the values of those up to it, weighted by their keys.

    Heads that share a key and a value lie side by side. The kernel is that of
    `jax.nn.dot_product_attention`; for `"blocks"` on a block of queries at a time.
    """
    if query.dtype != jnp.float64:
        if kernel == "blocks":
            return _in_blocks(query, key, value)
        with jax.numpy_dtype_promotion("standard"):  # jax widens half precision inside
            return jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=kernel
            )
    # There jax (0.12) would still take the softmax in single precision, and answers in
    # double would differ between numbers of devices as those in single do.
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(shared, group, axis=2) for shared in (key, value))
    products = jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
    is_seen = jnp.tril(jnp.ones(products.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(products, where=is_seen)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def _in_blocks(query: Array, key: Array, value: Array) -> Array:
    """Attend a block of queries at a time, and again for its gradient.

    Only one block's products with the keys are kept at once (Rabe and Staats 2021,
    "Self-attention does not need O(n²) memory").
    """
    batch, time, heads, size = query.shape
    length = math.gcd(time, _BLOCK)
    blocks = query.reshape(batch, -1, length, heads, size).swapaxes(0, 1)

    @jax.checkpoint
    def attend_block(first: Array, block: Array) -> tuple[Array, Array]:
        seen = jnp.arange(time)[None] <= first + jnp.arange(length)[:, None]
        with jax.numpy_dtype_promotion("standard"):
            out = jax.nn.dot_product_attention(
                block, key, value, mask=seen[None, None], implementation="xla"
            )
        return first + length, out

    _, outs = jax.lax.scan(attend_block, jnp.zeros((), jnp.int32), blocks)
    return outs.swapaxes(0, 1).reshape(query.shape)
