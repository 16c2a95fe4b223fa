"""Where a run's numbers go: JSON lines, TensorBoard, W&B, or several of them."""

from replicator.monitoring.writers import (
    JSONL,
    Async,
    Multi,
    TensorBoard,
    WandB,
    Writer,
)

__all__ = ["JSONL", "Async", "Multi", "TensorBoard", "WandB", "Writer"]
