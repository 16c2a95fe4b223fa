"""Where a run's numbers go: JSON lines, TensorBoard, W&B, or several of them."""

from replicator.monitoring.writers.asynchronous import Async
from replicator.monitoring.writers.jsonl import JSONL
from replicator.monitoring.writers.multi import Multi
from replicator.monitoring.writers.tensorboard import TensorBoard
from replicator.monitoring.writers.weights_and_biases import WandB
from replicator.monitoring.writers.writer import Writer

__all__ = ["JSONL", "Async", "Multi", "TensorBoard", "WandB", "Writer"]
