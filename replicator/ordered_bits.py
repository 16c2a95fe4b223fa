"""Keep a step's bits the same on any number of replicas: no collective but our own.

With `reduction="ordered"` gradients and metrics add up block by block in example order.
A collective of the step's own would bring back an order that depends on the replicas,
so such a step is refused (design law 1). Our own run under a name scope that says so.
"""

from contextlib import AbstractContextManager

import jax
from jax.extend import core

from replicator import dataflow
from replicator.errors import ArgumentError
from replicator.mesh import REPLICA_AXIS
from replicator.source_lines import user_line

_SCOPE = "replicator_ordered"
# Knowing its id, a replica may compute what another would not.
_COLLECTIVE_FREE = frozenset({"axis_index"})


def ordered_scope() -> AbstractContextManager:
    """Mark the collectives traced in this block as ours, in block order."""
    return jax.named_scope(_SCOPE)


def refuse_other_collectives(jaxpr: core.Jaxpr) -> None:
    """Refuse a step that speaks to other replicas on its own.

    Args:
      jaxpr: What one replica computes.

    Raises:
      ArgumentError: There is such a collective; names it and the user's line.
    """

    def refuse(eqn: core.JaxprEqn) -> bool:
        if (
            dataflow.over_axis(eqn, REPLICA_AXIS)
            and eqn.primitive.name not in _COLLECTIVE_FREE
            and _SCOPE not in str(eqn.source_info.name_stack)
        ):
            raise ArgumentError(
                "`reduction` must be 'fast' for a step with collectives of its own, "
                f"got 'ordered' and `{eqn.primitive.name}` at {user_line(eqn)}. Drop "
                "the collective, or the promise of equal bits."
            )
        return False

    dataflow.any_equation(jaxpr, refuse)
