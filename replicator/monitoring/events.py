"""The journal of a run: its events with their times, one JSON line each.

    {"time": "2026-11-21T12:00:00.123456+00:00", "kind": "saved", "process": 0,
     "session": "5c0e81fa", "uptime_s": 12.5, "step": 400}

A run may have many processes, at once and one after the other: `process` is unique
among those that run together, `session` among those before and after it. `uptime_s` is
monotonic inside a session; `time` is the machine's calendar time, and may jump.
"""

import datetime
import heapq
import logging
import os
import re
from pathlib import Path
from typing import Any

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.host.json_lines import append_line, read_lines
from replicator.base.host.paths import expanded
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

_OWN_NAMES = frozenset({"time", "process", "session", "uptime_s"})
_FILE_NAME = re.compile(r"events(\.\d+)?\.jsonl")
_log = logging.getLogger(__name__)


class EventLog:
    """Append to the journal in a run's directory, from any thread.

    The first process writes `events.jsonl`, process n `events.<n>.jsonl`: appends of
    several hosts to one file overwrite each other on network file systems. An event
    that cannot be written, for example to a full disk, is logged as a warning: training
    goes on without it.

    Args:
      directory: Made if absent.
      process: The index of this process among those that run together.
      clock: Clock of `uptime_s`, the seconds since this journal was opened.

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
          kind: started, resumed, compiled, recompiled, saved, save_failed,
            save_left_out, evaluated, preempted, rolled_back, skipped, spike, hung,
            unwatched, straggler, profiled, phases, ended, or any other kind of event.
          **fields: Details of the event, `step` where there is one; see `strict_json`
            for what JSON cannot hold. None is left out.

        Raises:
          ArgumentError: A field bears the name of one of the journal's own.
        """
        if taken := sorted(_OWN_NAMES & set(fields)):
            raise ArgumentError(
                f"`fields` must not use the names {', '.join(sorted(_OWN_NAMES))}, got "
                f"`{taken[0]}`. Rename the field."
            )
        given = {name: value for name, value in fields.items() if value is not None}
        row = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(),
            "kind": kind,
            "process": self._process,
            "session": self.session,
            "uptime_s": round(self._clock.now_s() - self._opened_s, 6),
            **given,
        }
        try:
            # Opened each time: events are rare, and nobody has to close a journal. No
            # lock: signal handlers and watchdogs write, too, and must never wait.
            with open(self._path, "a+b", buffering=0) as file:
                append_line(file, row)
        except OSError as failure:
            _log.warning("not in the journal: %s (%s)", row, failure)


def read_events(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a run, those of each process in the order written.

    Args:
      directory: Directory of the run; without a journal it has no events.

    Returns:
      One dict for each whole line, merged over processes by time.
    """
    root = expanded(directory)
    if not root.is_dir():
        return []
    files = sorted(path for path in root.iterdir() if _FILE_NAME.fullmatch(path.name))
    return list(heapq.merge(*map(_read, files), key=lambda event: event["time"]))


def was_killed(directory: str | os.PathLike[str]) -> bool:
    """Return whether the newest process of a run ended without an `ended` event."""
    events = read_events(directory)
    kinds = [each["kind"] for each in events if each.get("process", 0) == 0]
    return bool(kinds) and kinds[-1] != "ended"


def _file_name(process: int) -> str:
    return f"events.{process}.jsonl" if process else "events.jsonl"


def _read(path: Path) -> list[dict[str, Any]]:
    return [
        value
        for value in read_lines(path)
        if isinstance(value, dict) and {"time", "kind"} <= set(value)
    ]
