"""Compute a fingerprint of each device's own copy of each leaf, without a collective.

Each word of an array is mixed with its place by a bijection, the finalizer of
MurmurHash3 (Appleby 2011, `fmix32`), multiplied by an odd factor of its place, and all
are added up modulo 2^32. One changed word always changes the sum. Products alone would
not do: factors of the sign bit are all 2^31, so that any even number of flipped signs,
such as a negated array, would add up to nothing.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, odd: places become distant words
_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}


def fingerprints(leaves: Sequence[jax.Array]) -> jax.Array:
    """Dispatch the fingerprints of what each device holds of each leaf.

    Args:
      leaves: Arrays with `NamedSharding`s over one mesh, of any dtype.

    Returns:
      A table uint32[devices, leaves], its rows in the order of `mesh.devices.flat`,
      each on its device.

    >>> fingerprints([replicator.Replicator().put(jnp.ones(3))]).dtype
    dtype('uint32')
    """
    return _program(tuple(leaf.sharding for leaf in leaves))(list(leaves))


# One program for all checks of a run, also after it went back to a checkpoint.
@functools.lru_cache(maxsize=8)
def _program(shardings: tuple[NamedSharding, ...]):
    mesh = shardings[0].mesh
    return jax.jit(
        jax.shard_map(
            lambda leaves: jnp.stack(list(map(fingerprint, leaves)))[None],
            mesh=mesh,
            in_specs=([sharding.spec for sharding in shardings],),
            out_specs=P(mesh.axis_names),
            check_vma=False,  # the rows differ where copies that must not do
        )
    )


def fingerprint(array: jax.Array) -> jax.Array:
    """Return the fingerprint of an array, uint32, in a traced function.

    >>> int(fingerprint(jnp.zeros(2))) == int(fingerprint(-jnp.zeros(2)))
    False
    """
    words = _words(array)
    places = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    # Not of the flattened array: on TPUs that would be copied into another layout.
    for axis in reversed(range(words.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        places += along * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words ^ (places * jnp.uint32(_GOLDEN))
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    mixed ^= mixed >> jnp.uint32(16)
    return (mixed * (2 * places + 1)).sum(dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; an element of 64 bits is two."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    is_whole = jnp.issubdtype(array.dtype, jnp.integer)
    bits = (jnp.iinfo if is_whole else jnp.finfo)(array.dtype).bits
    unsigned = _UNSIGNED.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
