"""Compute a fingerprint of each device's own copy of each leaf, without a collective.

Each word of an array is mixed with its place by a bijection, the finalizer of
MurmurHash3 (Appleby 2011, `fmix32`), multiplied by an odd factor of its place, and all
are added up modulo 2^32. One changed word always changes the sum. Products alone would
not do: factors of the sign bit are all 2^31, so that any even number of flipped signs,
such as a negated array, would add up to nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, odd: places become distant words
_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
# XLA's CPU backend adds the elements of an array up one by one, but two arrays eight or
# sixteen elements at a time: sums of blocks that fit a cache are four times as fast.
_CPU_BLOCK = 2**16
_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}


def fingerprints(leaves: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Dispatch the fingerprints of what each device holds of each leaf.

    Args:
      leaves: Arrays of any dtype, with `NamedSharding`s over the mesh.
      mesh: Mesh of the devices.

    Returns:
      A table uint32[devices, leaves], its rows in the order of `mesh.devices.flat`,
      each on its device.

    >>> rep = replicator.Replicator()
    >>> fingerprints([rep.put(jnp.ones(3))], rep.mesh).dtype
    dtype('uint32')
    """
    return _program(mesh, tuple(leaf.sharding for leaf in leaves))(list(leaves))


# One program for all checks of a run, also after it went back to a checkpoint.
@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh, shardings: tuple[Any, ...]) -> Any:
    is_cpu = all(device.platform == "cpu" for device in mesh.local_devices)
    one = functools.partial(fingerprint, block=_CPU_BLOCK if is_cpu else None)
    return jax.jit(
        jax.shard_map(
            lambda leaves: jnp.stack(list(map(one, leaves)))[None],
            mesh=mesh,
            in_specs=([sharding.spec for sharding in shardings],),
            out_specs=P(mesh.axis_names),
            check_vma=False,  # copies are assumed to be equal: that is compared here
        )
    )


def fingerprint(array: jax.Array, *, block: int | None = None) -> jax.Array:
    """Return the fingerprint of an array, uint32, in a traced function.

    >>> int(fingerprint(jnp.zeros(2))) == int(fingerprint(-jnp.zeros(2)))
    False

    Args:
      array: Array of any dtype and shape.
      block: Number of elements that a loop takes at a time; None takes all at once. The
        result does not depend on it.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if block is None or array.size < 2 * block:
        return _terms(array, 0).sum(dtype=jnp.uint32)
    flat, count = array.ravel(), array.size // block

    def add(number: Any, terms: jax.Array) -> jax.Array:
        # Sliced before it is taken as words: XLA would copy all of them first.
        start = number * block
        return terms + _terms(lax.dynamic_slice_in_dim(flat, start, block), start)

    terms = lax.fori_loop(1, count, add, _terms(flat[:block], 0))
    rest = _terms(flat[count * block :], count * block)
    return terms.sum(dtype=jnp.uint32) + rest.sum(dtype=jnp.uint32)


def _terms(array: jax.Array, start: Any) -> jax.Array:
    """Return each word of an array, mixed with its place; `start` elements before."""
    words = _words(array)
    per_element = words.size // max(array.size, 1)
    places = jnp.asarray(start).astype(jnp.uint32) * jnp.uint32(per_element)
    stride = 1
    # Not of the flattened array: on TPUs that would be copied into another layout.
    for axis in reversed(range(words.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        places = places + along * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words ^ (places * jnp.uint32(_GOLDEN))
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    mixed = mixed ^ (mixed >> jnp.uint32(16))
    return mixed * (2 * places + 1)


def _words(array: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; an element of 64 bits is two."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    is_whole = jnp.issubdtype(array.dtype, jnp.integer)
    bits = (jnp.iinfo if is_whole else jnp.finfo)(array.dtype).bits
    unsigned = _UNSIGNED.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
