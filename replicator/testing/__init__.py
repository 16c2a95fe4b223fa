"""Check a step against laws and expectations, a run against what may happen to it."""

from replicator.testing.collectives import assert_collectives
from replicator.testing.invariance import (
    Comparison,
    InvarianceReport,
    assert_replica_invariant,
)

__all__ = [
    "Comparison",
    "InvarianceReport",
    "assert_collectives",
    "assert_replica_invariant",
]
