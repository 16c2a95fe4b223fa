"""The progress of a process, reported to its launcher."""

import os
from pathlib import Path

from replicator.errors import check_whole

VARIABLE = "REPLICATOR_PROGRESS_FILE"


def report_progress(step: int) -> None:
    """Report that the run can go on from `step`, for example after a checkpoint.

    `replicator launch` gives up a group that dies repeatedly without a higher number
    than before. Without a launcher nothing happens.

    Args:
      step: Number of updates that are safe.

    Raises:
      ArgumentError: `step` is not a whole number.

    >>> report_progress(1000)             # the state of step 1000 is on the disk
    """
    check_whole("step", step)
    if path := os.environ.get(VARIABLE):
        write_progress(Path(path), step)


def write_progress(path: Path, step: int) -> None:
    """Write the last report of a process, for `read_progress`."""
    # Written aside and renamed: the launcher never reads half a number.
    aside = Path(f"{path}.{os.getpid()}")
    try:
        aside.write_text(str(step))
        aside.replace(path)
    except OSError:
        # The launcher's folder is gone, and this process ends soon, too; or the disk is
        # full, which must not end a run that needs it no more than this.
        return


def read_progress(path: Path) -> int | None:
    """Return the last report of a process; None if there is none.

    >>> read_progress(Path("absent")) is None
    True
    """
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
