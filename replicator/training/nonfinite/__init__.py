"""Recovery from bad numbers: NaN, infinity, sudden spikes, and copies that differ.

`policy` decides, as a pure state machine; `spikes` finds numbers that leap; `rollback`
takes a run back to its last good checkpoint and past the bad batches. An update is
skipped inside the compiled step (`engine/step/skipping.py`).
"""

from replicator.training.nonfinite.spikes import Spikes

__all__ = ["Spikes"]
