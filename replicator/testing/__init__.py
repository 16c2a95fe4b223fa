"""Check a step against the law, and a run against what may happen to it."""

from replicator.testing.comparisons import Comparison, InvarianceReport
from replicator.testing.invariance import assert_replica_invariant

__all__ = ["Comparison", "InvarianceReport", "assert_replica_invariant"]
