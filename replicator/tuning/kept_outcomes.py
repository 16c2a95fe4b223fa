"""Outcomes of compiling, kept in a folder of files: one for each program.

A program is known by its text, the devices, and the versions and flags that compile it.
"""

import hashlib
import json
import os
from pathlib import Path

from replicator.base.host.compilation_cache import private_directory
from replicator.base.host.paths import write_whole
from replicator.tuning.outcome import CompileOutcome

_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


def outcomes_folder() -> str | None:
    """Return the folder of this user's outcomes; None if it is not private."""
    folder = private_directory("compiled")
    return None if folder is None else str(folder)


def kept_outcome(
    folder: str, outcome: CompileOutcome, devices: str
) -> CompileOutcome | None:
    """Return what was kept for the program of an outcome; None for nothing.

    Args:
      folder: The folder.
      outcome: Outcome that has the key and the versions.
      devices: Devices that it is compiled for.
    """
    try:
        return CompileOutcome.from_json(_file(folder, outcome, devices).read_bytes())
    except (OSError, ValueError):  # none, or one of another version of this package
        return None


def keep_outcome(folder: str, outcome: CompileOutcome, devices: str) -> None:
    """Keep an outcome, if another try would find the same."""
    if outcome.is_lasting:
        # Two processes may write the same: a reader finds one of both, and whole.
        write_whole(_file(folder, outcome, devices), outcome.to_json())


def _file(folder: str, outcome: CompileOutcome, devices: str) -> Path:
    flags = {name: os.environ.get(name, "") for name in _FLAGS}
    made_by = [outcome.key, devices, dict(outcome.versions), flags]
    name = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"{name[:32]}.json"
