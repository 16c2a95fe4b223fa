"""Rate limiters of Reverb that have an equivalent."""

from replicator.launchpad_bridge.compat.reverb_words import MinSize, SampleToInsertRatio
from replicator.launchpad_bridge.compat.submodules import missing

__all__ = ["MinSize", "SampleToInsertRatio"]

__getattr__ = missing("reverb.rate_limiters")
