"""What a run does about numbers that go bad: NaN, infinity, and sudden spikes.

`policy` decides, as a pure machine; `skipping` leaves out a bad update inside the
compiled step; `spikes` finds numbers that leap; `left_out` and `rollback` take a run
back to its last good checkpoint and past the batches that led it astray.
"""

from replicator.training.nonfinite.spikes import Spikes

__all__ = ["Spikes"]
