"""Keep a step's bits the same on any number of replicas: no collective but our own.

With `reduction="ordered"` gradients add up block by block in example order, in replicas
× microbatches blocks: the bits are those of that product, for two replicas or more. For
one replica XLA simplifies a program without partitions, and may order the sums inside a
block otherwise: it does for attention, not for layers and convolutions. (Neither an
optimization barrier nor leaving out XLA's passes one by one makes them equal.)
Metrics add up in order over replicas only: under accumulation their last bits may
depend on the cut.

A collective of the step's own would bring back an order that depends on the replicas,
so such a step is refused (design law 1). Our own run under a name scope of their own.
"""

from contextlib import AbstractContextManager

import jax
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.source_lines import user_line
from replicator.errors import ArgumentError

_SCOPE = "replicator_ordered"


def ordered_scope() -> AbstractContextManager:
    """Mark the collectives traced in this block as ours, in block order."""
    return jax.named_scope(_SCOPE)


def refuse_other_collectives(jaxpr: core.Jaxpr) -> None:
    """Refuse a step that has collectives of its own.

    Args:
      jaxpr: Program of one replica.

    Raises:
      ArgumentError: There is such a collective; names it and the user's line.
    """
    found = dataflow.find_collective(jaxpr, REPLICA_AXIS, but_in=_SCOPE)
    if found is not None:
        raise ArgumentError(
            "`reduction` must be 'fast' for a step with collectives of its own, got "
            f"'ordered' and `{found.primitive.name}` at {user_line(found)}. Drop the "
            "collective, or the promise of equal bits."
        )
