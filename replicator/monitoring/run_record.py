"""Record what a run was: seed, arguments, versions, code, devices, in `run.json`."""

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
    """Say where this process runs, in plain JSON; starts JAX if nothing did yet."""
    return {
        "index": jax.process_index(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": jax.local_device_count(),
    }


def describe_dataset(dataset: Any) -> str:
    """Say what a dataset is, and nothing of it is read: "list of 5", "train_data"."""
    name = getattr(dataset, "__qualname__", type(dataset).__qualname__)
    with contextlib.suppress(Exception):  # many have no length, and say so their way
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

    Starts JAX, if nothing did yet, to ask for its devices.

    Args:
      directory: Made if absent. A record that is there is replaced.
      seed: The run's seed.
      arguments: The run's arguments; what JSON cannot hold is written as its `repr`.
      processes: What each process said of itself; this one alone if None.
      checked: What is known of programs whose first updates were checked.

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
    _write_whole(path, strict_json(record, indent=2) + "\n")
    return path


def first_updates(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the record of a run knows of the check of its first updates.

    Returns:
      By the key of the program; nothing where the record, or a compiler of the same
      version that wrote it, is not there.
    """
    try:
        found = json.loads((Path(directory) / RECORD_NAME).read_text(encoding="utf-8"))
        by = found.get("versions", {})
    except (OSError, ValueError):
        return {}
    same = all(by.get(name) == versions()[name] for name in ("jax", "jaxlib"))
    return found.get("first_updates", {}) if same else {}


def note_first_update(
    directory: str | os.PathLike[str], result: Mapping[str, PyTree]
) -> None:
    """Write what came of the check of a program's first updates into `run.json`.

    Args:
      directory: A run's. One whose record cannot be written goes on without.
      result: By name; `program` is the key of the program.
    """
    path = Path(directory) / RECORD_NAME
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["first_updates"][result["program"]] = result
        _write_whole(path, strict_json(record, indent=2) + "\n")


def set_aside(directory: str | os.PathLike[str], *, but_journal: bool = False) -> None:
    """Move what an earlier run left in `directory` to `earlier/<n>` in it.

    Two runs in one `metrics.jsonl` would read as one. All else stays where it is: the
    checkpoints of this run, which are open by now, or a user's program and data.

    Args:
      directory: May hold a run, or nothing, or not be there.
      but_journal: Leave the journal, which goes on.
    """
    root = Path(directory)
    if not (root / RECORD_NAME).exists():
        return
    earlier = root / "earlier"
    earlier.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdecimal()]
    target = earlier / str(max(numbers, default=-1) + 1)
    target.mkdir()
    # The record last: without one the next run would leave here what is here still.
    for path in sorted(root.iterdir(), key=lambda path: path.name == RECORD_NAME):
        stays = but_journal and path.name.startswith("events")
        if not stays and _LEFT_BY_A_RUN.fullmatch(path.name):
            path.rename(target / path.name)


def is_same_run(
    directory: str | os.PathLike[str], *, seed: int, arguments: Mapping[str, PyTree]
) -> bool:
    """Tell whether `directory` holds the record of a run of this seed and arguments."""
    try:
        found = json.loads((Path(directory) / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    wanted = json.loads(strict_json({"seed": seed, "arguments": arguments}))
    return {name: found.get(name) for name in wanted} == wanted


def versions() -> dict[str, str | None]:
    """Return the versions of what a run is made of; None for what it does not use."""
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


def _write_whole(path: Path, text: str) -> None:
    # Not by `tempfile`: what that makes nobody else may read, such as who looks at a
    # colleague's run.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
