"""Add up matrices of a low rank: two thin matrices travel instead of one.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression",
algorithms 1 and 2: one step of the power method from the factor of the update before
(a warm start), with error feedback. Both factors are linear in a replica's matrix, so
float32 adds them by any sum; a matrix of at most that rank comes exactly.
"""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from replicator.collectives.precision import sum_dtype
from replicator.collectives.synchronise.method import matrix_shape

SumFn = Callable[[jax.Array], jax.Array]
"""The exact sum of an array over replicas."""

# A column that is so much smaller than the largest says nothing of a direction.
_NOTHING = 1e-5


def first_factor(
    path: str, leaf: Float[Array, "..."], rank: int
) -> Float[Array, "m {rank}"]:
    """Return the factor that the first update starts from: random, the same anywhere.

    Args:
      path: Path of the parameter, from which its numbers follow.
      leaf: The parameter.
      rank: Rank of the approximation.

    >>> first_factor("params/w", jnp.ones((8, 4)), 2).shape
    (4, 2)
    """
    _, m = matrix_shape(jnp.shape(leaf))
    key = jax.random.key(zlib.crc32(path.encode()))
    return jax.random.normal(key, (m, rank), sum_dtype(jnp.result_type(leaf)))


def low_rank_sum(
    share: Float[Array, "..."], factor: Float[Array, "m rank"], sum_fn: SumFn
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "m rank"]]:
    """Return the sum of the best found approximations, what is owed, and the factor.

    Args:
      share: This replica's share of the update and what it owes, of a matrix's shape
        or more dimensions, in float32 or float64.
      factor: Factor of the update before, the same on all replicas.
      sum_fn: Sum over replicas.

    Returns:
      The sum, the same on all replicas; what this replica owes; and the factor that the
      next update starts from.
    """
    matrix = share.reshape(matrix_shape(share.shape))
    # Orthonormal, also where columns depend on each other, or are zero.
    basis, _ = jnp.linalg.qr(sum_fn(matrix @ factor))
    own = matrix.T @ basis
    total = sum_fn(own)
    owed = matrix - basis @ own.T
    summed = (basis @ total.T).reshape(share.shape)
    return summed, owed.reshape(share.shape), _warm(total, factor)


def _warm(total: jax.Array, before: jax.Array) -> jax.Array:
    """Return the next factor: columns without a direction are those of before."""
    sizes = jnp.linalg.norm(total, axis=0)
    known = sizes > _NOTHING * sizes.max()
    unit = total / jnp.where(known, sizes, 1)[None]
    return jnp.where(known[None], unit, before)
