"""Write numbers to Weights & Biases. Install the extra `wandb`.

The training step is a number of its own in each row, and the axis of all others:
W&B's own step may not go back, and a run that was killed does some steps again.
"""

import os
from collections.abc import Mapping
from typing import Any

from replicator.base.host.paths import checked_path
from replicator.base.optional_package import optional_package

_STEP = "step"


class WandB:
    """Log scalars to one run of W&B.

    Args:
      directory: Folder of W&B's files; None lets it choose.
      **settings: Arguments of `wandb.init`: `project`, `name`, `mode="offline"`; with
        `id` and `resume="allow"` a run that was killed goes on in the same place.

    Raises:
      ArgumentError: `directory` is not a path.
      ImportError: wandb is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, **settings: Any
    ):
        place = checked_path("directory", directory)
        with optional_package("WandB", "wandb", extra="wandb"):
            import wandb  # pyright: ignore[reportMissingImports]
        self._run: Any = wandb.init(dir=place and str(place), **settings)
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one row."""
        numbers = {name: float(number) for name, number in scalars.items()}
        self._run.log(numbers | {_STEP: step})

    def flush(self) -> None:
        """Do nothing: W&B sends rows in a process of its own, when it can."""

    def close(self) -> None:
        """End W&B's run, when all rows are sent or on the disk."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
