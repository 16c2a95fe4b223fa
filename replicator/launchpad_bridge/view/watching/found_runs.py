"""Find the programs of this user that run on this host, by the folders of their runs.

A run's folder is its owner's alone (0700) and locked by who launched it, so what is
found here runs, and belongs to who looks.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replicator.errors import LaunchError
from replicator.launchpad_bridge.planning import DESCRIPTION
from replicator.launchpad_bridge.run_folder import is_held

LINK = "dashboard.url"
"""In the run's folder: the page of a program that was launched with one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """A program that runs.

    Attributes:
      folder: Of the run.
      program: Its name.
      run_id: What tells this run from others.
      pid: Of the process that launched it.
      workers: How many there are.
      started_s: When, in seconds since 1970.
      link: Opens its page, if it was launched with a dashboard; else "".
    """

    folder: Path
    program: str
    run_id: str
    pid: int
    workers: int
    started_s: float
    link: str = dataclasses.field(default="", repr=False)  # opens the page


def running_programs(parents: Iterable[str | Path] | None = None) -> list[FoundRun]:
    """Return the programs of this user that run, the oldest first.

    Args:
      parents: Where to look for folders; by default where runs make them.
    """
    if parents is None:
        parents = dict.fromkeys((tempfile.gettempdir(), "/tmp"))
    found = []
    for parent in parents:
        for folder in Path(parent).glob("lp-*"):
            with contextlib.suppress(LaunchError):
                found.append(run_in(folder))
    return sorted(found, key=lambda run: (run.started_s, run.run_id))


def run_in(folder: Path) -> FoundRun:
    """Return the program whose run has a folder.

    Raises:
      LaunchError: It is no folder of a run of this user, or its run has ended.
    """
    try:
        status = folder.lstat()
        if status.st_uid != os.geteuid():
            raise LaunchError(
                f"`folder` must belong to this user, got {str(folder)!r}, of user "
                f"{status.st_uid}. Look at it as who launched the program."
            )
        if folder.is_symlink() or not is_held(folder):
            raise LaunchError(
                f"`folder` must be that of a program that runs, got {str(folder)!r}, "
                "which nobody holds any more. Launch the program again."
            )
        described = describe_run(folder)
        return FoundRun(
            folder=folder,
            program=described["program"],
            run_id=described["run_id"],
            pid=described["pid"],
            workers=len(described["workers"]),
            started_s=(folder / DESCRIPTION).stat().st_mtime,
            link=(folder / LINK).read_text() if (folder / LINK).exists() else "",
        )
    except (OSError, ValueError) as error:
        raise _not_running(folder, error) from error


def matching(runs: Iterable[FoundRun], words: str) -> list[FoundRun]:
    """Return those whose name, run or process is meant.

    Args:
      runs: Programs that run.
      words: The name, the beginning of the run's id, or the launcher's process id.
    """
    return [
        run
        for run in runs
        if words in (run.program, str(run.pid)) or run.run_id.startswith(words)
    ]


def describe_run(folder: Path) -> dict[str, Any]:
    """Return what a run's folder says of its program.

    Raises:
      LaunchError: It says nothing, or something else.
    """
    try:
        described = json.loads((folder / DESCRIPTION).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _not_running(folder, error) from error
    match described:
        case {"program": str(), "run_id": str(), "pid": int(), "workers": list()}:
            return described
    raise _not_running(folder, ValueError(f"{DESCRIPTION} is damaged"))


def _not_running(folder: Path, error: Exception) -> LaunchError:
    return LaunchError(
        f"`folder` must be that of a program that runs, got {str(folder)!r} ({error}). "
        "It may have ended: `replicator program` lists those that run."
    )
