"""`replicator checkpoints DIR`: list the checkpoints of a directory; verify them."""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence

from replicator.base.out_of_memory import readable
from replicator.checkpoint import reading
from replicator.checkpoint.directories.named import (
    Directory,
    checked_directory,
    open_directory,
)
from replicator.checkpoint.manifest import Manifest
from replicator.cli.tables import make_console, print_table
from replicator.errors import CheckpointError

SUMMARY = "List the checkpoints of a directory, and verify them"

_EPILOG = """\
`saved` is the time of its manifest, the file that makes it a checkpoint (not known in
a bucket), `writers` the number of processes that wrote it. Without --verify only
manifests are read. Exit code 1 if one is damaged.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="what `run(checkpoint_dir=...)` got, or the URL of a bucket",
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
      saved: Time of its manifest, in UTC by ISO 8601; None in a bucket.
      size_bytes: Size of all its files but the manifest.
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
    directory = open_directory(checked_directory("DIR", arguments.directory))
    listed = list_checkpoints(directory, verified=arguments.verify)
    if arguments.json:
        rows = [dataclasses.asdict(each) for each in listed]
        print(json.dumps({"directory": str(directory), "checkpoints": rows}))
    else:
        _print_table(listed)
    return 1 if any(each.damage for each in listed) else 0


def list_checkpoints(directory: Directory, *, verified: bool) -> list[ListedCheckpoint]:
    """Return what a directory holds, in the order of saves; damaged manifests last.

    Args:
      directory: A directory of checkpoints.
      verified: Whether to read all of each, and compare it with its manifest.

    Raises:
      CheckpointError: It is not a directory of checkpoints.
    """
    found = reading.scan(directory)
    listed = [_listed(directory, each, verified=verified) for each in found.manifests]
    damaged = [
        ListedCheckpoint(step=step, damage=str(why))
        for step, why in found.damaged.items()
    ]
    return [*listed, *damaged]


def _listed(
    directory: Directory, manifest: Manifest, *, verified: bool
) -> ListedCheckpoint:
    damage, saved = None, None
    if verified:
        try:
            directory.verify(manifest)
        except CheckpointError as failure:
            damage = str(failure)
    if (saved_s := directory.saved_at_s(manifest.step)) is not None:
        time = datetime.datetime.fromtimestamp(saved_s, datetime.UTC)
        saved = time.isoformat(timespec="seconds")
    strategy = manifest.meta.get("strategy")
    whole = "whole" if verified else "there"
    return ListedCheckpoint(
        step=manifest.step,
        saved=saved,
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
