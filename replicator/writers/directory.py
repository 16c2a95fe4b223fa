"""Choose the writers of a run's directory: JSON lines, and TensorBoard if there."""

import importlib.util
import os
from pathlib import Path

from replicator.writers.asynchronous import Async
from replicator.writers.jsonl import JSONL
from replicator.writers.multi import Multi
from replicator.writers.tensorboard import TensorBoard
from replicator.writers.writer import Writer


def directory_writer(directory: str | os.PathLike[str]) -> Writer:
    """Return a writer into `directory`, in a thread of its own.

    Args:
      directory: Made if absent. It gets `metrics.jsonl`, and event files under
        `tensorboard/` where `tensorboardX` is installed.

    Returns:
      The writer; closing it drains it.
    """
    root = Path(directory)
    writers: list[Writer] = [JSONL(root / "metrics.jsonl")]
    if importlib.util.find_spec("tensorboardX") is not None:
        writers.append(TensorBoard(root / "tensorboard"))
    return Async(Multi(*writers))
