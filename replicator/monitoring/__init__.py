"""What a run did, and does: phases, events, progress, records of its numbers."""

from replicator.monitoring import writers

__all__ = ["writers"]
