"""Checks of a step against laws and expectations, and faults for a run."""

from replicator.testing.collectives import assert_collectives
from replicator.testing.comparisons import Comparison, InvarianceReport
from replicator.testing.invariance import assert_replica_invariant

__all__ = [
    "Comparison",
    "InvarianceReport",
    "assert_collectives",
    "assert_replica_invariant",
]
