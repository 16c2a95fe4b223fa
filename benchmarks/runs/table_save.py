"""Rows and counts in the last save of a replay table, and what a later one lacks."""

from pathlib import Path
from typing import Any, NamedTuple

from replicator.errors import CheckpointError
from replicator.launchpad_bridge.replay.saved_values import read_value


class TableSave(NamedTuple):
    """A save of a table that removes its oldest rows.

    Attributes:
      keys: Of the rows that it holds, oldest first.
      counts: Numbers that never go down, by name; empty before the first save.
    """

    keys: list[int]
    counts: dict[str, int]


def read_save(folder: Path) -> TableSave:
    """Return the last save; its table may be about to write another one.

    Raises:
      CheckpointError: A file is not as it was written.
    """
    manifest = _manifest(folder)
    while True:
        try:
            return TableSave(_keys(folder, manifest), _counts(manifest))
        except CheckpointError:
            # The next save has replaced the file, which its manifest does not name.
            before, manifest = manifest, _manifest(folder)
            if _names(before) == _names(manifest):
                raise


def lost_since(before: TableSave, after: TableSave) -> list[str]:
    """List what a save lacks of one before it, of the same table or its successor."""
    found = [
        f"`{name}` of the table went from {count} back to {after.counts.get(name, 0)}"
        for name, count in before.counts.items()
        if after.counts.get(name, 0) < count
    ]
    removed = max(after.counts.get("full", 0) - before.counts.get("full", 0), 0)
    kept = before.keys[removed:]
    if lost := set(kept) - set(after.keys):
        found.append(f"{len(lost)} of {len(kept)} rows that a table saved were lost")
    return found


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "table"
    return read_value(path) if path.exists() else {"segments": [], "counts": {}}


def _names(manifest: dict[str, Any]) -> list[str]:
    return [each["name"] for each in manifest["segments"]]


def _keys(folder: Path, manifest: dict[str, Any]) -> list[int]:
    return [
        int(key)
        for each in manifest["segments"]
        for key in read_value(folder / each["name"])["keys"][each["rows"]]
    ]


def _counts(manifest: dict[str, Any]) -> dict[str, int]:
    counts = manifest["counts"]
    totals = {name: counts[name] for name in ("inserted", "taken") if name in counts}
    return totals | counts.get("counts", {}) | counts.get("dropped", {})
