"""The journal of a run: what happened to it, and when, one JSON line an event.

    {"time": "2026-11-21T12:00:00.123456+00:00", "kind": "saved", "process": 0,
     "session": "5c0e81fa", "uptime_s": 12.5, "step": 400}

A run may have many processes, at once and one after the other: `process` tells those
apart that run together, `session` each of them from those before and after it.
`uptime_s` is monotonic inside a session; `time` is what the machine's calendar said,
and may jump. A line is one append: a kill tears the last line at most, and readers skip
it.
"""

import datetime
import heapq
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.host.paths import expanded
from replicator.base.host.strict_json import strict_json
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

_OWN_NAMES = frozenset({"time", "process", "session", "uptime_s"})
_FILE_NAME = re.compile(r"events(\.\d+)?\.jsonl")
_log = logging.getLogger(__name__)


class EventLog:
    """Append to the journal in a run's directory, from any thread.

    The first process writes `events.jsonl`, process n `events.<n>.jsonl`: appends of
    several hosts to one file overwrite each other on network file systems. What cannot
    be written, for example to a full disk, is logged as a warning: a journal is no
    reason to stop training.

    Args:
      directory: Made if absent.
      process: The index of this process among those that run together.
      clock: Where `uptime_s`, the seconds since this journal was opened, comes from.

    Raises:
      OSError: The directory cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        process: int = 0,
        clock: Clock | None = None,
    ):
        self._clock = clock or SystemClock()
        self._opened_s = self._clock.now_s()
        self._process = process
        self.session = os.urandom(4).hex()
        self._path = expanded(directory) / _file_name(process)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, /, **fields: PyTree) -> None:
        """Append one event.

        Args:
          kind: What happened: started, resumed, compiled, recompiled, saved,
            save_failed, save_left_out, evaluated, preempted, rolled_back, skipped,
            spike, hung, straggler, profiled, phases, ended, or whatever else a reader
            should know.
          **fields: What is to be said of it, `step` where there is one; what JSON
            cannot hold is written as its `repr`. None is left out.

        Raises:
          ArgumentError: A field bears the name of one of the journal's own.
        """
        if taken := sorted(_OWN_NAMES & set(fields)):
            raise ArgumentError(
                f"`fields` must not use the names {', '.join(sorted(_OWN_NAMES))}, got "
                f"`{taken[0]}`. Rename the field."
            )
        said = {name: value for name, value in fields.items() if value is not None}
        row = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(),
            "kind": kind,
            "process": self._process,
            "session": self.session,
            "uptime_s": round(self._clock.now_s() - self._opened_s, 6),
            **said,
        }
        try:
            # No lock: signal handlers and watchdogs write, too, and must never wait.
            _append(self._path, strict_json(row).encode() + b"\n")
        except OSError as failure:
            _log.warning("not in the journal: %s (%s)", row, failure)


def read_events(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a run, those of each process in the order written.

    Args:
      directory: The run's; one without a journal has no events.

    Returns:
      One dict for each whole line, merged over processes by time.
    """
    root = expanded(directory)
    if not root.is_dir():
        return []
    files = sorted(path for path in root.iterdir() if _FILE_NAME.fullmatch(path.name))
    return list(heapq.merge(*map(_read, files), key=lambda event: event["time"]))


def was_killed(directory: str | os.PathLike[str]) -> bool:
    """Tell whether the newest process of a run came to no end that it could tell of."""
    events = read_events(directory)
    kinds = [each["kind"] for each in events if each.get("process", 0) == 0]
    return bool(kinds) and kinds[-1] != "ended"


def _file_name(process: int) -> str:
    return f"events.{process}.jsonl" if process else "events.jsonl"


def _append(path: Path, line: bytes) -> None:
    # Opened each time: events are rare, and nobody has to close a journal.
    with open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            # Cut short by a kill or a full disk: what comes now is a line of its own.
            line = b"\n" + line
        # One write to a file opened to append: lines of two threads do not mix.
        file.write(line)


def _read(path: Path) -> list[dict[str, Any]]:
    return [event for line in path.read_bytes().splitlines() if (event := _parse(line))]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return an event, or None for what a kill or a full disk cut short."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(event, dict) and {"time", "kind"} <= set(event)
    return event if is_event else None
