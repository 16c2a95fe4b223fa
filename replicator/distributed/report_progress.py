"""What a process and its launcher know of each other: a group, and how far it came."""

import os
from pathlib import Path

from replicator.distributed.coordination import process_count
from replicator.errors import DistributedError, check_whole

VARIABLE = "REPLICATOR_PROGRESS_FILE"


def require_joined() -> None:
    """Return unless a launcher made this process one of several, and it is alone.

    Raises:
      DistributedError: It is: each of them would do the whole work.
    """
    told = os.environ.get("REPLICATOR_NUM_PROCESSES", "1")
    if os.environ.get(VARIABLE) and told != "1" and process_count() == 1:
        raise DistributedError(
            "The group must be joined by each process that `replicator launch` starts, "
            f"got one of {told} that is alone. Call "
            "`replicator.distributed.initialize()` at the top of the script."
        )


def report_progress(step: int) -> None:
    """Say that the run can go on from `step`, for example after a checkpoint.

    `replicator launch` gives up a group that dies again and again without a higher
    number than before. Without a launcher nothing happens.

    Args:
      step: Updates that are safe.

    Raises:
      ArgumentError: `step` is no whole number.

    >>> report_progress(1000)             # what step 1000 made is on the disk
    """
    check_whole("step", step)
    path = os.environ.get(VARIABLE)
    if not path:
        return
    # Written aside and renamed: the launcher never reads half a number.
    aside = Path(f"{path}.{os.getpid()}")
    try:
        aside.write_text(str(step))
        aside.replace(path)
    except FileNotFoundError:
        # The launcher, and its folder, are gone: so will be this process.
        return


def read_progress(path: Path) -> int | None:
    """Return what a process reported last; None if it never did."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
