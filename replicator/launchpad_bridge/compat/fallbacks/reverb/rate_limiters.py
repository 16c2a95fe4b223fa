"""Rate limiters of Reverb that have an equivalent."""

from replicator.launchpad_bridge.compat.reverb_words import MinSize, SampleToInsertRatio

__all__ = ["MinSize", "SampleToInsertRatio"]
