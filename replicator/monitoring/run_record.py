"""Record of a run in `run.json`: seed, arguments, versions, code, devices."""

import contextlib
import datetime
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy
import optax

from replicator.base.host.paths import write_whole
from replicator.base.host.strict_json import strict_json
from replicator.base.types import PyTree
from replicator.base.version import __version__

RECORD_NAME = "run.json"
_GIT_TIMEOUT_S = 10.0
_LEFT_BY_A_RUN = re.compile(
    r"run\.json|(metrics|events(\.\d+)?)\.jsonl|report\.html"
    r"|tensorboard|postmortem|profile|stacks"
)


def describe_process() -> dict[str, Any]:
    """Return host, pid and devices of this process as plain JSON; may start JAX."""
    return {
        "index": jax.process_index(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": jax.local_device_count(),
    }


def describe_dataset(dataset: Any) -> str:
    """Describe a dataset without reading it.

    >>> describe_dataset([1, 2, 3])
    'list of 3'
    """
    name = getattr(dataset, "__qualname__", type(dataset).__qualname__)
    with contextlib.suppress(Exception):  # many have no length
        return f"{name} of {len(dataset)}"
    return name


def write_run_record(
    directory: str | os.PathLike[str],
    *,
    seed: int,
    arguments: Mapping[str, PyTree],
    processes: Sequence[Mapping[str, PyTree]] | None = None,
    checked: Mapping[str, PyTree] | None = None,
) -> Path:
    """Write `run.json` into `directory`, whole or not at all.

    Starts JAX, if nothing did yet, to list its devices.

    Args:
      directory: Made if absent. A record in it is replaced.
      seed: The run's seed.
      arguments: The run's arguments; see `strict_json` for what JSON cannot hold.
      processes: `describe_process()` of each process; this one alone if None.
      checked: Results of checks of first updates, by program.

    Returns:
      The path of the record.
    """
    path = Path(directory) / RECORD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "seed": seed,
        "arguments": arguments,
        "argv": sys.argv,
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "host": socket.gethostname(),
        "versions": versions(),
        "git": _git(),
        "devices": _devices(),
        "processes": list(processes or [describe_process()]),
        "first_updates": dict(checked or {}),
    }
    write_whole(path, strict_json(record, indent=2) + "\n")
    return path


def first_updates(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the results of checks of first updates in the record of a run.

    Returns:
      Results by the key of the program; nothing if there is no record, or one by
      another version of the compiler.
    """
    try:
        found = json.loads((Path(directory) / RECORD_NAME).read_text(encoding="utf-8"))
        saved = found.get("versions", {})
    except (OSError, ValueError):
        return {}
    same = all(saved.get(name) == versions()[name] for name in ("jax", "jaxlib"))
    return found.get("first_updates", {}) if same else {}


def note_first_update(
    directory: str | os.PathLike[str], result: Mapping[str, PyTree]
) -> None:
    """Write the result of a check of a program's first updates into `run.json`.

    Args:
      directory: Directory of a run. If its record cannot be written, nothing happens.
      result: Result by name; `program` is the key of the program.
    """
    path = Path(directory) / RECORD_NAME
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["first_updates"][result["program"]] = result
        write_whole(path, strict_json(record, indent=2) + "\n")


def set_aside(directory: str | os.PathLike[str], *, but_journal: bool = False) -> None:
    """Move the files of an earlier run in `directory` to `earlier/<n>` in it.

    Two runs in one `metrics.jsonl` would read as one. All else stays: the checkpoints
    of this run, which are open by now, or a user's program and data.

    Args:
      directory: May hold a run, or nothing, or be absent.
      but_journal: Whether to leave the journal, which goes on.
    """
    root = Path(directory)
    if not (root / RECORD_NAME).exists():
        return
    earlier = root / "earlier"
    earlier.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdecimal()]
    target = earlier / str(max(numbers, default=-1) + 1)
    target.mkdir()
    # The record last: without one the next run would not move the rest.
    for path in sorted(root.iterdir(), key=lambda path: path.name == RECORD_NAME):
        stays = but_journal and path.name.startswith("events")
        if not stays and _LEFT_BY_A_RUN.fullmatch(path.name):
            path.rename(target / path.name)


def is_same_run(
    directory: str | os.PathLike[str], *, seed: int, arguments: Mapping[str, PyTree]
) -> bool:
    """Return whether `directory` has the record of a run of this seed and arguments.

    Another choice of a strategy makes it no other run.
    """
    try:
        found = json.loads((Path(directory) / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    wanted = json.loads(strict_json({"seed": seed, "arguments": arguments}))
    found = {name: found.get(name) for name in wanted}
    for each in (wanted, found):
        if isinstance(each["arguments"], dict) and each["arguments"].pop("choice", 0):
            del each["arguments"]["strategy"]
    return found == wanted


def versions() -> dict[str, str | None]:
    """Return the versions of a run's packages; None for one that it does not use."""
    flax = sys.modules.get("flax")  # the core never imports it
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": numpy.__version__,
        "optax": optax.__version__,
        "flax": getattr(flax, "__version__", None),
        "replicator": __version__,
    }


def _git() -> dict[str, Any] | None:
    """Name the commit of a checkout, and whether tracked files differ from it."""
    try:
        directory = Path.cwd()  # it may be gone
        commit = _git_output(directory, "rev-parse", "HEAD")
        changes = _git_output(directory, "status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, no checkout, no commit yet, or no such folder
    return {"commit": commit, "dirty": bool(changes)}


def _git_output(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        check=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout.strip()


def _devices() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }
