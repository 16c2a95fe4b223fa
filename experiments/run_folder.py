"""A run's folder belongs to the settings of its run: no other goes on from there.

Settings for how long, where, or how it is judged and drawn may differ from sitting to
sitting; with anything else the numbers at the end would be those of the first run.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from experiments.config_flags import Settings
from replicator.checkpoint.commit import list_steps
from replicator.checkpoint.disk import Disk
from replicator.errors import ArgumentError
from replicator.hooks import every

SAVED_EVERY_S = 5.0
_NAME = "settings.json"
_CHECKPOINTS, _ROWS = "checkpoints", "replay"


def claim(
    directory: str | os.PathLike[str],
    config: Settings,
    *,
    free: Collection[str],
    flag: str = "directory",
) -> None:
    """Write a run's settings into its folder; refuse those of another that is saved.

    Args:
      directory: The folder; it is made.
      config: Of the run.
      free: Names of the fields that may differ.
      flag: That names the folder.

    Raises:
      ArgumentError: It names no folder; or a run with another setting, or with settings
        that nobody wrote down, keeps what it learned there.
      OSError: The settings cannot be read or written.
    """
    if not os.fspath(directory):
        raise ArgumentError(f"`--{flag}` must be a folder, got ''. Name one.")
    path = Path(directory) / _NAME
    fields = [each for each in dataclasses.fields(config) if each.name not in free]
    if not _saved(directory):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of a run with other settings, or of which nothing else is left.
        _remove_rows(directory)
        own = {each.name: getattr(config, each.name) for each in fields}
        Disk().replace_file(path, json.dumps(own, indent=1).encode())
        return
    if not path.exists():
        raise ArgumentError(
            f"`--{flag}` must be the folder of a run with these settings, got "
            f"{directory}, whose checkpoints have none. Use another."
        )
    kept = json.loads(path.read_text())
    for each in fields:
        # One that came to the experiment later was what it is by default.
        value, before = getattr(config, each.name), kept.get(each.name, each.default)
        if value != before:
            raise ArgumentError(
                f"`--{each.name}` must be {before}, that of the run in {directory}, "
                f"got {value}. Use another --{flag}."
            )


def checkpoints_of(directory: str | os.PathLike[str]) -> Path:
    """Return where a run is saved, and from where it goes on."""
    return Path(directory) / _CHECKPOINTS


def rows_of(directory: str | os.PathLike[str]) -> Path:
    """Return where the replay table of a run keeps its rows."""
    return Path(directory) / _ROWS


def saved_in(
    directory: Path | None, *, seconds: float = SAVED_EVERY_S
) -> dict[str, Any]:
    """Return the options of a session that is saved in a folder; None saves nothing.

    Args:
      directory: Of the run.
      seconds: From one save to the next.
    """
    if directory is None:
        return {}
    saved = str(checkpoints_of(directory))
    return {"checkpoint_dir": saved, "checkpoint_every": every(seconds=seconds)}


def last_saved(directory: str | os.PathLike[str]) -> int:
    """Return how many updates the newest checkpoint of a run has behind it."""
    return max(_saved(directory), default=0)


def release(directory: str | os.PathLike[str]) -> None:
    """Let the next run in a folder begin anew: this one ended, and was reported."""
    shutil.rmtree(checkpoints_of(directory), ignore_errors=True)
    _remove_rows(directory)
    (Path(directory) / _NAME).unlink(missing_ok=True)


def _remove_rows(directory: str | os.PathLike[str]) -> None:
    """Remove the rows of a replay table; another folder of that name stays."""
    rows = rows_of(directory)
    if (rows / "table").is_file():
        shutil.rmtree(rows, ignore_errors=True)


def _saved(directory: str | os.PathLike[str]) -> list[int]:
    saved = checkpoints_of(directory)
    return list_steps(saved) if saved.is_dir() else []
