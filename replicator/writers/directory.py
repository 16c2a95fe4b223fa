"""Choose the writers of a run's directory: JSON lines, and TensorBoard if there."""

import importlib.util
import os
from functools import partial
from pathlib import Path

from replicator.writers.asynchronous import Async
from replicator.writers.forgiving import Forgiving
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
      The writer; closing it drains it. What it cannot write it logs, and counts.
    """
    root = Path(directory)
    writers = [Forgiving(partial(JSONL, root / "metrics.jsonl"))]
    if importlib.util.find_spec("tensorboardX") is not None:
        writers.append(Forgiving(partial(TensorBoard, root / "tensorboard")))
    # And once more: a disk that does not answer is one that cannot be written to.
    return Forgiving(lambda: Async(Multi(*writers)))
