"""Compare arguments, program and state of all processes once, by one exchange.

Every process must run the same steps on the same state. One that does not would hang
the others in a collective, or quietly train another model: so they compare, once.
"""

import hashlib
import json
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from replicator.base.host.strict_json import strict_json
from replicator.base.mesh import spans_processes
from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange, first_odd
from replicator.errors import ArgumentError


def require_same_arguments(mesh: Mesh, arguments: Mapping[str, PyTree]) -> None:
    """Raise unless all processes have the same arguments.

    Raises:
      ArgumentError: One has others; names it and the argument.
    """
    if spans_processes(mesh):
        _require_same("arguments", json.loads(strict_json(arguments)))


def require_same_program(
    mesh: Mesh, key: Callable[[], str], *, name: str = "step_fn"
) -> None:
    """Raise unless a function became the same program in all processes.

    Args:
      mesh: Mesh of all processes.
      key: Returns the key of the program; called only with several processes.
      name: Name of the function, for errors.

    Raises:
      ArgumentError: It is another program in one process; names it.
    """
    if spans_processes(mesh):
        _require_same("program", {name: key()})


def require_same_state(mesh: Mesh, state: PyTree) -> None:
    """Raise unless leaves that each process has whole are equal in all of them.

    Args:
      mesh: Mesh of all processes.
      state: Arrays on devices, or on the host of each.

    Raises:
      ArgumentError: A leaf differs in one process; names both.
    """
    if not spans_processes(mesh):
        return
    found = [(path, leaf) for path, leaf in named_leaves(state) if _is_whole(leaf)]
    sums = _checksums([_own(leaf) for _, leaf in found])
    leaves = {
        path: f"{describe(leaf)} of checksum {checksum}"
        for (path, leaf), checksum in zip(found, map(int, sums), strict=True)
    }
    digest = hashlib.sha256(json.dumps(leaves).encode()).hexdigest()
    if len(set(exchange("same/state", digest))) > 1:
        _require_same("leaves", leaves)


def _require_same(kind: str, own: Mapping[str, PyTree]) -> None:
    found = exchange(f"same/{kind}", dict(own))
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each.get(name) for each in found]
        if odd := first_odd(values):
            process, other = odd
            raise ArgumentError(
                f"`{name}` must be the same in all processes, got {values[process]!r} "
                f"in process {process} and {values[other]!r} in process {other}. Start "
                "the same program everywhere."
            )


def _is_whole(leaf: PyTree) -> bool:
    if not isinstance(leaf, jax.Array):
        return True
    return leaf.is_fully_replicated or leaf.is_fully_addressable


def _own(leaf: PyTree) -> PyTree:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf.addressable_data(0)
    return leaf


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Add up the bits of each leaf, mixed with their positions."""
    return [_checksum(leaf) for leaf in leaves]


def _checksum(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        width = leaf.dtype.itemsize
        unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
        leaf = lax.bitcast_convert_type(leaf, unsigned)
    bits = leaf.astype(jnp.uint32).ravel()
    # Mixed as MurmurHash3 ends: sums of products alone are 0 for ones as for zeros.
    mixed = bits ^ (lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    return mixed.sum(dtype=jnp.uint32)
