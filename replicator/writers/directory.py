"""Writers of a run's directory: JSON lines, and TensorBoard if installed."""

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
        `tensorboard/` if `tensorboardX` is installed.

    Returns:
      The writer; closing it drains it. Rows that it cannot write are counted, logged.
    """
    root = Path(directory)
    writers = [Forgiving(partial(JSONL, root / "metrics.jsonl"))]
    if importlib.util.find_spec("tensorboardX") is not None:
        writers.append(Forgiving(partial(TensorBoard, root / "tensorboard")))
    # And once more, for `TimeoutError`: a disk that does not answer is like a full one.
    return Forgiving(lambda: Async(Multi(*writers)))
