"""Check a step against the law, and a run against what may happen to it."""

from replicator.testing.invariance import (
    Comparison,
    InvarianceReport,
    assert_replica_invariant,
)

__all__ = ["Comparison", "InvarianceReport", "assert_replica_invariant"]
