"""Save the state of a whole run, so that it is there whole or not at all.

A checkpoint is a directory named by its step: `state/`, which orbax writes and plain
orbax reads, and `manifest.json`, which says what must be in it. It appears by a rename.
"""

from replicator.checkpoint.background import SaveCounts
from replicator.checkpoint.reading import Restored
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Restored", "SaveCounts", "Snapshot"]
