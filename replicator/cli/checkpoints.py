"""`replicator checkpoints DIR`: list the checkpoints of a directory; verify them."""

import argparse
import dataclasses
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path

from replicator.base.host.paths import expanded
from replicator.base.out_of_memory import readable
from replicator.checkpoint import reading
from replicator.checkpoint.commit import checkpoint_path
from replicator.checkpoint.directories.on_disk import DiskDirectory
from replicator.checkpoint.manifest import MANIFEST_NAME, Manifest, verify
from replicator.cli.tables import make_console, print_table
from replicator.errors import CheckpointError

SUMMARY = "List the checkpoints of a directory, and verify them"

_EPILOG = """\
`saved` is the time of the file that makes it a checkpoint; `writers` the processes that
wrote it. Without --verify only these files are read. Exit code 1 if one is damaged.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "directory",
        type=expanded,
        metavar="DIR",
        help="what `run(checkpoint_dir=...)` got",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all of each, and compare"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of a table"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ListedCheckpoint:
    """One checkpoint, as the command shows it; None where its manifest is damaged.

    Attributes:
      step: Updates made.
      saved: Time of its manifest, in UTC by ISO 8601.
      size_bytes: Size of its arrays on the disk.
      leaves: Number of leaves of the state.
      writers: Number of processes that wrote it.
      format: Number of its format.
      strategy: Name of the strategy that it was saved under, if a run saved it.
      status: `there`, `whole` if it was verified, or `damaged`.
      damage: Error of a damaged one.
    """

    step: int
    saved: str | None = None
    size_bytes: int | None = None
    leaves: int | None = None
    writers: int | None = None
    format: int | None = None
    strategy: str | None = None
    status: str = "damaged"
    damage: str | None = None


def main(arguments: argparse.Namespace) -> int:
    """Print the checkpoints; 1 if one is damaged, else 0.

    Raises:
      CheckpointError: It is not a directory of checkpoints.
    """
    listed = list_checkpoints(arguments.directory, verified=arguments.verify)
    if arguments.json:
        rows = [dataclasses.asdict(each) for each in listed]
        place = os.fspath(arguments.directory)
        print(json.dumps({"directory": place, "checkpoints": rows}))
    else:
        _print_table(listed)
    return 1 if any(each.damage for each in listed) else 0


def list_checkpoints(directory: Path, *, verified: bool) -> list[ListedCheckpoint]:
    """Return what a directory holds, in the order of saves; damaged manifests last.

    Args:
      directory: A directory of checkpoints.
      verified: Whether to read all of each, and compare it with its manifest.

    Raises:
      CheckpointError: It is not a directory of checkpoints.
    """
    found = reading.scan(DiskDirectory(directory))
    listed = [_listed(directory, each, verified=verified) for each in found.manifests]
    damaged = [
        ListedCheckpoint(step=step, damage=str(why))
        for step, why in found.damaged.items()
    ]
    return [*listed, *damaged]


def _listed(directory: Path, manifest: Manifest, *, verified: bool) -> ListedCheckpoint:
    checkpoint = checkpoint_path(directory, manifest.step)
    damage = None
    if verified:
        try:
            verify(checkpoint, manifest)
        except CheckpointError as failure:
            damage = str(failure)
    strategy = manifest.meta.get("strategy")
    saved_s = (checkpoint / MANIFEST_NAME).stat().st_mtime
    saved = datetime.datetime.fromtimestamp(saved_s, datetime.UTC)
    whole = "whole" if verified else "there"
    return ListedCheckpoint(
        step=manifest.step,
        saved=saved.isoformat(timespec="seconds"),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        leaves=len(manifest.leaves),
        writers=manifest.writers,
        format=manifest.format,
        strategy=strategy.get("name") if isinstance(strategy, dict) else None,
        status="damaged" if damage else whole,
        damage=damage,
    )


def _print_table(listed: Sequence[ListedCheckpoint]) -> None:
    numbers = ("step", "size", "leaves", "writers", "format")
    header = ("step", "saved (UTC)", *numbers[1:], "strategy", "status")
    rows = [
        (
            each.step,
            (each.saved or "-")[:19].replace("T", " "),
            "-" if each.size_bytes is None else readable(each.size_bytes),
            *map(_or_dash, (each.leaves, each.writers, each.format, each.strategy)),
            each.status,
        )
        for each in listed
    ]
    print_table(header, rows, right=numbers)
    for each in listed:
        if each.damage:
            text = f"step {each.step}: {each.damage}"
            make_console().print(text, markup=False, highlight=False)


def _or_dash(value: object) -> object:
    return "-" if value is None else value
