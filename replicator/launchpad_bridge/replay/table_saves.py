"""Checkpoints of a replay table: rows once, in segments; a manifest at each save.

    rows-000000, rows-000001, ...   rows in the order of insertion, each file written
                                    once; the last one anew until it is full, and
                                    those of which most rows went
    table                           which rows of these are held; priorities, counts

A save writes the rows that came since the last one, makes them durable, and only then
replaces the manifest; files that it does not name are deleted after that. So one that
is killed anywhere leaves the save before, whole.
"""

import logging
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from replicator.checkpoint.disk import Disk
from replicator.checkpoint.lock import WriterLock
from replicator.errors import CheckpointMismatchError
from replicator.launchpad_bridge.replay.held_rows import SavedRows
from replicator.launchpad_bridge.replay.saved_values import read_value, write_value
from replicator.launchpad_bridge.running import node_context

_MANIFEST, _ROWS = "table", "rows-"
_OURS = re.compile(r"(table|rows-\d{6,})(\.\d+\.draft)?|\..*")
_SEGMENT_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20  # copied at once: an insert into one of its places waits for it
_log = logging.getLogger(__name__)


class TableRecords(NamedTuple):
    """Records of a table at one moment.

    Attributes:
      keys: int64 [capacity], of the row in each place.
      priorities: float64 [capacity].
      times: int64 [capacity], how often each row was drawn.
      counts: Counts, as plain data.
    """

    keys: np.ndarray
    priorities: np.ndarray
    times: np.ndarray
    counts: dict[str, Any]


class SavableTable(Protocol):
    """What a save needs of a table."""

    def row_bytes(self) -> int:
        """Return the size of a row."""
        ...

    def new_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return places and keys, int64 [n], of rows since the last call, in order."""
        ...

    def are_held(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return which rows, int64 [n], still have these keys: bool [n]."""
        ...

    def read_rows(self, slots: np.ndarray, keys: np.ndarray) -> dict[str, Any]:
        """Copy those rows, int64 [n], that still have these keys: int64 [n].

        Returns:
          `slots`, `keys`, `versions`, int64 [m], and `rows`, leaves [m, ...].
        """
        ...

    def records(self) -> TableRecords:
        """Return the records of all rows."""
        ...


class _Segment(NamedTuple):
    name: str
    slots: np.ndarray  # -1: not held since it was loaded
    keys: np.ndarray


class TableSaves:
    """Saves of one table, in a directory of its own.

    Attributes:
      directory: The directory.
      is_over: Set by `close`.
    """

    def __init__(self, directory: Path) -> None:
        """Become the directory's only writer.

        Raises:
          CheckpointInUseError: Another table writes to it.
          CheckpointMismatchError: It holds something else.
        """
        self.directory, self._disk = directory, Disk()
        self._disk.make_directories(directory)
        names = sorted(path.name for path in directory.iterdir())
        if wrong := [name for name in names if not _OURS.fullmatch(name)]:
            raise CheckpointMismatchError(
                f"`checkpoint_dir` must be empty, or of a replay table, got {directory}"
                f" with {wrong[0]}. Choose another directory."
            )
        self._writer = WriterLock(directory, self._disk)
        self._writer.acquire(above=0)
        # One save at a time; taken before the table's lock, never under it.
        self._saving = threading.Lock()
        self._full: list[_Segment] = []
        self._last: _Segment | None = None  # which is not full yet
        self._open = np.zeros((2, 0), np.int64)  # places and keys of its rows
        self._is_behind = False  # some of these are not written
        self._next_number = 0
        self.is_over = threading.Event()

    def load(self, insert: Callable[[SavedRows], np.ndarray]) -> dict[str, Any] | None:
        """Hand over all rows, oldest first, a segment at a time.

        Args:
          insert: Takes rows in; returns their places, int64 [n], -1 for none.

        Returns:
          The counts of the last save; None if there was none.

        Raises:
          CheckpointError: A file is not as it was written.
        """
        if not (self.directory / _MANIFEST).exists():
            self._tidy(())
            return None
        manifest = read_value(self.directory / _MANIFEST)
        for saved in manifest["segments"]:
            file = read_value(self.directory / saved["name"])
            at = saved["rows"]
            rows = SavedRows(
                jax.tree.map(lambda leaf, at=at: leaf[at], file["rows"]),
                file["keys"][at],
                file["versions"][at],
                saved["priorities"],
                saved["times"],
            )
            slots = np.full(len(file["keys"]), -1)
            slots[at] = insert(rows)
            # A copy: the one that was read would keep all rows of its file.
            self._full.append(_Segment(saved["name"], slots, np.array(file["keys"])))
        self._next_number = manifest["next_number"]
        self._tidy([saved["name"] for saved in manifest["segments"]])
        return manifest["counts"]

    def save(self, table: SavableTable) -> None:
        """Save a table; return once all rows inserted before are durable."""
        with self._saving:
            self._writer.require_current()
            found = np.stack(table.new_rows())
            # Should writing them fail, the next save has them all the same.
            self._open = np.concatenate([self._open, found], axis=1)
            self._is_behind |= found.size > 0
            if self._is_behind:
                self._open = self._open[:, table.are_held(*self._open)]
                self._write_rows(table)
                self._is_behind = False
            self._merge_sparse(table)
            records = table.records()
            self._full = [each for each in self._full if _held(each, records).any()]
            segments = [*self._full, *([self._last] if self._last else [])]
            manifest = _manifest(segments, records)
            manifest["next_number"] = self._next_number
            write_value(self.directory / _MANIFEST, manifest, disk=self._disk)
            self._tidy([each.name for each in segments])

    def close(self) -> None:
        """Save no more; let others write to the directory."""
        self.is_over.set()
        with self._saving:
            self._writer.release()

    def _write_rows(self, table: SavableTable) -> None:
        """Write rows that no full segment has; all segments but the last are full."""
        size = max(_SEGMENT_BYTES // table.row_bytes(), 1)
        while self._open.size:
            given = self._open[:, :size]
            segment = self._write_segment(table, *given)
            if given.shape[1] < size:
                self._last = segment
                return
            self._full.append(segment)
            self._open, self._last = self._open[:, size:], None
        self._last = None  # its rows went

    def _write_segment(
        self, table: SavableTable, slots: np.ndarray, keys: np.ndarray
    ) -> _Segment:
        saved = _copied(table, slots, keys)
        # One that cannot be written keeps its number, so there is one draft of it.
        name = f"{_ROWS}{self._next_number:06d}"
        segment = _Segment(name, saved.pop("slots"), saved["keys"])
        write_value(self.directory / name, saved, disk=self._disk)
        self._next_number += 1
        return segment

    def _merge_sparse(self, table: SavableTable) -> None:
        """Write rows anew, in order, where files hold more than four times as many.

        The oldest go by whole segments; where other rows go, each file may keep a few.
        """
        records = table.records()
        held = [_held(each, records) for each in self._full]
        size = max(map(len, held), default=0)
        if sum(map(len, held)) <= 4 * sum(map(np.count_nonzero, held)) + size:
            return
        merged: list[_Segment] = []
        for segment, is_held in zip(self._full, held, strict=True):
            few = _Segment("", segment.slots[is_held], segment.keys[is_held])
            if 4 * len(few.keys) >= size:
                merged.append(segment)
            elif merged and not merged[-1].name and 4 * len(merged[-1].keys) < size:
                both = zip(merged[-1][1:], few[1:], strict=True)
                merged[-1] = _Segment("", *map(np.concatenate, both))
            else:
                merged.append(few)
        self._full = [
            each if each.name else self._write_segment(table, each.slots, each.keys)
            for each in merged
            if len(each.keys)
        ]

    def _tidy(self, names: Sequence[str]) -> None:
        """Delete segments that the manifest does not name, and drafts."""
        for path in self.directory.iterdir():
            name = _OURS.fullmatch(path.name)
            if name and name[1] and path.name not in (_MANIFEST, *names):
                path.unlink(missing_ok=True)


def save_in_background(table: Any, saves: TableSaves, *, every_s: float) -> None:
    """Call `table.save` at intervals, and once more when its node ends.

    The thread does not keep a table that nobody else has.
    """
    found = weakref.ref(table)

    def save(table: Any) -> None:
        try:
            if table is not None:
                table.save()
        except Exception:
            # Its rows stay in memory, and the next save has them.
            _log.exception("A replay table was not saved")

    def run() -> None:
        while not saves.is_over.wait(every_s):
            save(found())

    def end() -> None:
        save(table)
        saves.close()

    threading.Thread(target=run, name="replay saves", daemon=True).start()
    weakref.finalize(table, saves.close)
    if (context := node_context.current()) is not None:
        context.when_over(end)


def _copied(table: SavableTable, slots: np.ndarray, keys: np.ndarray) -> dict[str, Any]:
    """Return rows that still have these keys, copied piece by piece."""
    size = max(_PIECE_BYTES // table.row_bytes(), 1)
    pieces = [
        table.read_rows(slots[first : first + size], keys[first : first + size])
        for first in range(0, len(slots), size)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)


def _held(segment: _Segment, records: TableRecords) -> np.ndarray:
    """Return which rows of a segment are held: bool [n]."""
    return (segment.slots >= 0) & (records.keys[segment.slots] == segment.keys)


def _manifest(segments: Sequence[_Segment], records: TableRecords) -> dict[str, Any]:
    saved, held = [], 0
    for segment in segments:
        rows = np.flatnonzero(_held(segment, records))
        slots = segment.slots[rows]
        held += len(rows)
        saved.append(
            {
                "name": segment.name,
                "rows": rows,
                "priorities": records.priorities[slots],
                "times": records.times[slots],
            }
        )
    counts = dict(records.counts)
    # Rows that came while this save was written are not in it, and count as not there.
    counts["inserted"] -= counts.pop("held") - held
    return {"segments": saved, "counts": counts}
