"""Name a compiled program by what it is made of: one key for all who remember it."""

import hashlib

import jax


def program_key(lowered: jax.stages.Lowered) -> str:
    """Return the hash of a program's text: StableHLO, without lines of sources.

    Args:
      lowered: Before it is compiled. Shapes, shardings and the mesh are in it.
    """
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
