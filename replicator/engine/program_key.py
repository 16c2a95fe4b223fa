"""Key of a program: a hash of its text."""

import hashlib

import jax


def program_key(lowered: jax.stages.Lowered) -> str:
    """Return the hash of a program's text: StableHLO, without lines of sources.

    Args:
      lowered: The program before it is compiled, with shapes, shardings and mesh.

    >>> one, other = (jax.jit(jnp.sin).lower(1.0) for _ in range(2))
    >>> program_key(one) == program_key(other)
    True
    """
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
