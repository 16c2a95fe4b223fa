"""Refuse early, by one exchange, what would differ between the processes of a run.

Every process must run the same steps on the same state. One that does not would hang
the others in a collective, or quietly train another model: so they compare, once.
"""

import hashlib
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from replicator.base.host.strict_json import strict_json
from replicator.base.mesh import spans_processes
from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange
from replicator.errors import ArgumentError


def require_same_arguments(mesh: Mesh, arguments: Mapping[str, PyTree]) -> None:
    """Return if all processes were given the same arguments.

    Raises:
      ArgumentError: One was not; it and the argument are named.
    """
    if spans_processes(mesh):
        _require_same("arguments", json.loads(strict_json(arguments)))


def require_same_program(mesh: Mesh, lowered: jax.stages.Lowered) -> None:
    """Return if a step became the same program in all processes.

    Raises:
      ArgumentError: It did not in one, which is named.
    """
    if spans_processes(mesh):
        text = lowered.as_text().encode()
        _require_same("program", {"step_fn": hashlib.sha256(text).hexdigest()[:16]})


def require_same_state(mesh: Mesh, state: PyTree) -> None:
    """Return if what is to be equal on all replicas is so in all processes.

    Raises:
      ArgumentError: A leaf is not in one process; both are named.
    """
    if not spans_processes(mesh):
        return
    found = [(path, leaf) for path, leaf in named_leaves(state) if _is_whole(leaf)]
    sums = _checksums([leaf.addressable_data(0) for _, leaf in found])
    words = {
        path: f"{describe(leaf)} of checksum {checksum}"
        for (path, leaf), checksum in zip(found, map(int, sums), strict=True)
    }
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()
    if len(set(exchange("same/state", digest))) > 1:
        _require_same("leaves", words)


def _require_same(what: str, words: Mapping[str, PyTree]) -> None:
    said = exchange(f"same/{what}", dict(words))
    for name in dict.fromkeys(name for word in said for name in word):
        values = [word.get(name) for word in said]
        common = max(values, key=values.count)
        for process, value in enumerate(values):
            if value != common:
                raise ArgumentError(
                    f"`{name}` must be the same in all processes, got {value!r} in "
                    f"process {process} and {common!r} in process "
                    f"{values.index(common)}. Start the same program everywhere."
                )


def _is_whole(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_fully_replicated


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Add up the bits of each leaf, weighted by where they stand."""
    return [_checksum(leaf) for leaf in leaves]


def _checksum(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        width = leaf.dtype.itemsize
        words = {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
        leaf = lax.bitcast_convert_type(leaf, words)
    bits = leaf.astype(jnp.uint32).ravel()
    weights = 2 * lax.iota(jnp.uint32, bits.size) + jnp.uint32(1)
    return (bits * weights).sum(dtype=jnp.uint32)
