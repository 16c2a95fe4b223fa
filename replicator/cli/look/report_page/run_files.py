"""Read the files of a run, whatever state its directory is in.

A run may have been killed in the middle of a line, may have written NaN, may have
lost files: what cannot be read is left out and reported, and never ends the report.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicator.errors import ArgumentError
from replicator.monitoring.events import read_events
from replicator.monitoring.run_record import RECORD_NAME

METRICS_NAME = "metrics.jsonl"
_EARLIER = "earlier"
_FOLDERS = ("postmortem", "stacks")
_MOST_TEXT_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """One line of metrics.

    Attributes:
      step: Number of updates done.
      time_s: Seconds since the process that wrote it opened the file.
      numbers: Metrics by name; may be NaN or infinite.
    """

    step: int
    time_s: float
    numbers: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeftFile:
    """A post-mortem or a stack dump.

    Attributes:
      path: Path below the run's directory.
      size_bytes: Size of the file.
      text: Its beginning, if it is a small text; None otherwise.
    """

    path: str
    size_bytes: int
    text: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """All that is in the directory of a run.

    Attributes:
      directory: The directory.
      record: `run.json`; empty if it cannot be read.
      rows: Rows of the present run, those of all its processes one after the other.
      earlier: Rows of runs that were set aside, by name.
      events: Events in the order of time.
      left: Post-mortems and stack dumps.
      problems: A sentence for each file that could not be read.
    """

    directory: Path
    record: Mapping[str, Any]
    rows: Sequence[MetricRow]
    earlier: Mapping[str, Sequence[MetricRow]]
    events: Sequence[Mapping[str, Any]]
    left: Sequence[LeftFile]
    problems: Sequence[str]


def read_run(directory: Path) -> RunFiles:
    """Read the directory of a run.

    Raises:
      ArgumentError: It is not the directory of a run.
    """
    _require_run(directory)
    problems: list[str] = []
    return RunFiles(
        directory=directory,
        record=_read_record(directory, problems),
        rows=_read_rows(directory / METRICS_NAME, problems),
        earlier={
            f"{_EARLIER}/{folder.name}": _read_rows(folder / METRICS_NAME, problems)
            for folder in _earlier_folders(directory)
        },
        events=_read_events(directory, problems),
        left=[found for name in _FOLDERS for found in _read_left(directory, name)],
        problems=problems,
    )


def _require_run(directory: Path) -> None:
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "is not there"
    elif any(directory.glob("events*.jsonl")) or any(
        (directory / name).exists() for name in (RECORD_NAME, METRICS_NAME)
    ):
        return
    else:
        what = f"holds no {RECORD_NAME}, {METRICS_NAME} or events.jsonl"
    raise ArgumentError(
        f"`DIR` must be the directory of a run, got {directory}, which {what}. "
        "Use the one that `run(directory=...)` was given."
    )


def _read_record(directory: Path, problems: list[str]) -> dict[str, Any]:
    path = directory / RECORD_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        problems.append(f"{RECORD_NAME} could not be read: {_message(failure)}.")
        return {}
    return found if isinstance(found, dict) else {}


def _read_rows(path: Path, problems: list[str]) -> list[MetricRow]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as failure:
        problems.append(f"{path.name} could not be read: {_message(failure)}.")
        return []
    rows = [row for line in lines if line.strip() and (row := _parse_row(line))]
    if torn := sum(bool(line.strip()) for line in lines) - len(rows):
        problems.append(f"{path.name}: {torn} damaged lines were left out.")
    return rows


def _parse_row(line: bytes) -> MetricRow | None:
    try:
        found = json.loads(line)
        step, time_s = int(found.pop("step")), float(found.pop("time_s", math.nan))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None  # cut short by a crash
    numbers = {
        name: number for name, value in found.items() for number in _float(value)
    }
    return MetricRow(step=step, time_s=time_s, numbers=numbers)


def _float(value: Any) -> Iterator[float]:
    # NaN and infinities are strings there, which `float` reads.
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            yield float(value)
        except (ValueError, OverflowError):
            return


def _read_events(directory: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        return read_events(directory)
    except (OSError, ValueError, TypeError) as failure:
        problems.append(f"events.jsonl could not be read: {_message(failure)}.")
        return []


def _earlier_folders(directory: Path) -> list[Path]:
    root = directory / _EARLIER
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if (path / METRICS_NAME).exists()]
    return sorted(folders, key=lambda path: (len(path.name), path.name))


def _read_left(directory: Path, folder: str) -> Iterator[LeftFile]:
    for path in sorted((directory / folder).rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield LeftFile(
                path=str(path.relative_to(directory)),
                size_bytes=path.stat().st_size,
                text=_text(path) if path.suffix in (".txt", ".json", ".md") else None,
            )


def _text(path: Path) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_TEXT_BYTES)
    except OSError:
        return None


def _message(failure: Exception) -> str:
    return (getattr(failure, "strerror", None) or str(failure)).rstrip(".")
