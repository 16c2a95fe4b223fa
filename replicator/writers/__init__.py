"""Writers of a run's numbers: JSON lines, TensorBoard, W&B, or several of them."""

from replicator.writers.asynchronous import Async
from replicator.writers.jsonl import JSONL
from replicator.writers.multi import Multi
from replicator.writers.tensorboard import TensorBoard
from replicator.writers.weights_and_biases import WandB
from replicator.writers.writer import Writer

__all__ = ["JSONL", "Async", "Multi", "TensorBoard", "WandB", "Writer"]
