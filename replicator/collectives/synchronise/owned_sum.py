"""Add up numbers that travel in a narrow form: each piece where a replica owns it.

Each replica sends every other the piece that this one owns, narrow; the owner adds them
in float32, and sends all others the sum, narrow again. A ring that adds in bfloat16
would round at every hop: of 256, 2 and six times 1 it makes 258, here 264 comes.

What rounding took away is returned, to be added to the next numbers (error feedback:
Seide et al. 2014, "1-bit stochastic gradient descent", §3; with an owner, as in Tang et
al. 2019, "DoubleSqueeze", algorithm 1). The owner has the error of its sum, too: so
what all replicas send and owe is what they were given.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from replicator.collectives.context.axes import Axis, position
from replicator.collectives.synchronise.method import piece_of
from replicator.collectives.synchronise.narrow import decode, encode


def owned_sum(
    values: Float[Array, "n"], axis: Axis, form: str
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Return the sum over replicas of numbers that travel narrow, and what is owed.

    Args:
      values: This replica's numbers, in float32 or float64.
      axis: The replicas, maybe in groups of one size.
      form: As in `encode`.

    Returns:
      The sum, the same on all replicas of a group, and this replica's part of what is
      missing in it.
    """
    [size], dtype = values.shape, values.dtype
    own = piece_of(size, axis.group_size)
    padded = jnp.pad(values, (0, own * axis.group_size - size))
    pieces = padded.reshape(axis.group_size, own)
    sent = encode(pieces, form)
    came = lax.all_to_all(
        sent, axis.name, 0, 0, axis_index_groups=axis.groups, tiled=True
    )
    total = decode(came, form, own, dtype).sum(axis=0)
    given = encode(total[None], form)
    everywhere = lax.all_gather(
        given, axis.name, axis_index_groups=axis.groups, tiled=True
    )
    summed = decode(everywhere, form, own, dtype)
    owed = pieces - decode(sent, form, own, dtype)
    owed = owed.at[_place(axis)].add(total - decode(given, form, own, dtype)[0])
    return summed.reshape(-1)[:size], owed.reshape(-1)[:size]


def _place(axis: Axis) -> jax.Array:
    """Return this replica's place in its group."""
    if axis.groups is None:
        return position(axis)
    places = {replica: n for group in axis.groups for n, replica in enumerate(group)}
    table = jnp.asarray([places[replica] for replica in range(axis.size)], jnp.int32)
    return table[position(axis)]
