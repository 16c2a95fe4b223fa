"""Save the state of a whole run, so that a checkpoint is whole or absent.

A checkpoint is a directory named by its step: arrays of zarr 3, whose shards each
process writes (`pieces`), and `manifest.json`, which lists its content. It appears by a
rename.
"""

from replicator.checkpoint.background import SaveCounts
from replicator.checkpoint.reading import Restored
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Restored", "SaveCounts", "Snapshot"]
