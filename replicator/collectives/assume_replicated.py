"""Promise, for a value that the replication proof cannot follow, that replicas agree.

The proof walks the step's jaxpr and trusts sums and gathers over all replicas. A ring
of `permute` calls may agree by arithmetic that it does not know. The promise is a
primitive of its own, so that the proof finds it by name; the compiler never sees it.
It also marks random numbers that are meant to be shared by all examples.
"""

import jax
from jax.interpreters import ad

from replicator.base.types import PyTree
from replicator.collectives.context.axes import with_arrays
from replicator.collectives.markers import make_marker

ASSUME_REPLICATED = "assume_replicated"
"""Name of the primitive, by which a walk over a jaxpr recognises the promise."""


def assume_replicated(tree: PyTree) -> PyTree:
    """Return `tree` unchanged, promised to be equal on all replicas.

    The promise is not checked. State that breaks it drifts apart without an error: use
    it only where `compile` refuses a value that you can show to be equal. Random
    numbers that pass through it are meant to be shared by all replicas: no warning.

    Args:
      tree: Per-replica arrays that are equal on all replicas.

    Returns:
      The same arrays. Gradients pass through.

    On two replicas the larger of two, which the proof cannot see to be equal:

    >>> def larger(x):
    ...     other = permute(x, [(0, 1), (1, 0)])
    ...     return assume_replicated(jnp.maximum(x, other))
    >>> jax.vmap(larger, axis_name="replica")(jnp.array([3, 5]))
    Array([5, 5], dtype=int32)
    """
    return jax.tree.map(_assume_p.bind, with_arrays(tree))


_assume_p = make_marker(ASSUME_REPLICATED)
# A tangent of equal values is equal, so it carries the promise too; a cotangent comes
# from each replica's own loss, so it does not.
ad.deflinear2(_assume_p, lambda cotangent, _: [cotangent])
