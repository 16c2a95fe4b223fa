"""Add up arrays of which few rows are not zero: gradients of an embedding.

Replicas send their rows and the places of these, and each adds all of them up, one
replica after the other: then no two rows of an addition have the same place, and all
devices get the same bits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from replicator.collectives.context.axes import Axis


def rows_sum(
    leaf: Num[Array, "n *row"], most_rows: int, axis: Axis
) -> Num[Array, "n *row"]:
    """Return the sum of an array over replicas.

    Args:
      leaf: This replica's array, with at most `most_rows` rows that are not zero.
      most_rows: Number of rows that a replica sends.
      axis: All replicas.
    """
    n, order = leaf.shape[0], jnp.arange(most_rows, dtype=jnp.int32)
    used = (leaf != 0).reshape(n, -1).any(axis=1)
    [places] = jnp.nonzero(used, size=most_rows, fill_value=n)
    # Places behind the end, one for each row that is left over.
    places = jnp.where(places == n, n + order, places.astype(jnp.int32))
    own = leaf.at[places].get(mode="fill", fill_value=0)
    everywhere = lax.all_gather((places, own), axis.name)

    def add(total: jax.Array, sent: tuple) -> tuple[jax.Array, None]:
        places, rows = sent
        where = total.at[places]
        added = where.add(
            rows, mode="drop", unique_indices=True, indices_are_sorted=True
        )
        return added, None

    return lax.scan(add, jnp.zeros_like(leaf), everywhere)[0]
