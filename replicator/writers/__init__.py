"""Where a run's numbers go: JSON lines, TensorBoard, several places, another thread."""

from replicator.writers.asynchronous import Async
from replicator.writers.jsonl import JSONL
from replicator.writers.multi import Multi
from replicator.writers.tensorboard import TensorBoard
from replicator.writers.writer import Writer

__all__ = ["JSONL", "Async", "Multi", "TensorBoard", "Writer"]
