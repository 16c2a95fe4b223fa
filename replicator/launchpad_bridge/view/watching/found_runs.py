"""Find the programs of this user that run on this host, by the folders of their runs.

Only its owner can enter a run's folder (0700), and its launcher holds a lock on it, so
programs found here run, and belong to this user.
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
"""File in the run's folder with the link to its dashboard, if it has one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """A program that runs.

    Attributes:
      folder: Folder of the run.
      program: Name of the program.
      run_id: Unique id of the run.
      pid: Process that launched it.
      workers: Number of workers.
      started_s: Time of the launch, in seconds since 1970.
      link: Link to its page, if it was launched with a dashboard; else "".
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
      parents: Folders that hold folders of runs; by default those that runs use.
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
      LaunchError: It is not a folder of a run of this user, or the run has ended.
    """
    try:
        status = folder.lstat()
        if status.st_uid != os.geteuid():
            raise LaunchError(
                f"`folder` must belong to this user, got {str(folder)!r}, of user "
                f"{status.st_uid}. Open it as the user who launched the program."
            )
        if folder.is_symlink() or not is_held(folder):
            raise LaunchError(
                "`folder` must belong to a running program, got "
                f"{str(folder)!r}, whose launcher has exited. Launch the program again."
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


def matching(runs: Iterable[FoundRun], text: str) -> list[FoundRun]:
    """Return the runs with this name, id or process.

    Args:
      runs: Programs that run.
      text: Name, beginning of the run's id, or the launcher's process id.

    >>> runs = [FoundRun(folder=Path("lp-1"), program="training", run_id="ab12",
    ...                  pid=7, workers=3, started_s=0.0)]
    >>> [run.program for run in matching(runs, "ab")], matching(runs, "other")
    (['training'], [])
    """
    return [
        run
        for run in runs
        if text in (run.program, str(run.pid)) or run.run_id.startswith(text)
    ]


def describe_run(folder: Path) -> dict[str, Any]:
    """Return the description of the program in a run's folder.

    Raises:
      LaunchError: It has none, or a damaged one.
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
        f"`folder` must belong to a running program, got {str(folder)!r} ({error}). "
        "It may have ended: `replicator program` lists those that run."
    )
