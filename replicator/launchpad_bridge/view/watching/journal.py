"""Journal of a program's run: a line whenever a worker starts or ends.

    {"at_s": …, "run": {"phase": "running", …}, "workers": {"actors/3": {…}}}

The first line has all workers, each later one those that changed. So a run that nobody
watches pays for a short write where a worker starts or ends, and for nothing between.
A watcher keeps the file open, and so reads the last line, how the run ended, even after
the run's folder is gone.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicator.base.host.json_lines import append_line, parse_lines
from replicator.distributed.processes.states import Finish, State, WorkerState

JOURNAL = "states.jsonl"
"""In the run's folder, beside the program's description."""
_LONGEST_LINE_BYTES = 1 << 24
_LOG = logging.getLogger("replicator.launchpad_bridge")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNote:
    """State of a worker, as the supervisor has it.

    Attributes:
      phase: "running", "waiting" for its restart, or "ended".
      restarts: Number of restarts.
      since_s: Time of the last start, in seconds since 1970.
      outcome: Outcome of the last end, as in `Exited`; "" before the first.
      error: Error that it ended with, in a line; "" for none.
    """

    phase: str
    restarts: int
    since_s: float
    outcome: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """State of a run.

    Attributes:
      phase: "starting", "running", "stopping", "killing" or "ended".
      failure: First failure, in a line; "" for none.
      stopped_by: Worker that asked for the stop; "" for none.
      workers: States of the workers, by name.
    """

    phase: str = "starting"
    failure: str = ""
    stopped_by: str = ""
    workers: Mapping[str, WorkerNote] = dataclasses.field(default_factory=dict)


class RunJournal:
    """Writes the notes of one run; in one thread.

    If the launcher dies in a write, a reader sees a line without an end, and waits for
    the rest.
    """

    def __init__(self, folder: Path) -> None:
        """Note in a folder; nothing is written yet."""
        self._path = folder / JOURNAL
        self._noted = RunNote()

    def note(self, state: State | None, finish: Finish | None) -> None:
        """Write what has changed; a full disk is a warning, and the run goes on."""
        if state is None:
            return
        now = _note_of(state, finish)
        if now == self._noted:
            return
        known, self._noted = self._noted.workers, now
        new = {n: worker for n, worker in now.workers.items() if worker != known.get(n)}
        run = dataclasses.asdict(dataclasses.replace(now, workers=new))
        line = {"at_s": time.time(), "workers": run.pop("workers"), "run": run}
        try:
            with open(self._path, "a+b", buffering=0, opener=_open_private) as file:
                append_line(file, line)
        except OSError as error:
            _LOG.warning(
                "The state of the run cannot be noted in %s: %s", self._path, error
            )


class JournalReader:
    """Reads the notes of a run, also those written after its folder went away."""

    def __init__(self, folder: Path) -> None:
        """Open the journal of a run.

        Raises:
          OSError: There is none (yet).
        """
        self._file = (folder / JOURNAL).open("rb")
        self._rest = b""
        self._known = RunNote()

    def read(self) -> RunNote:
        """Return the state of the run as its newest line has it."""
        data = self._rest + self._file.read(_LONGEST_LINE_BYTES)
        whole, newline, self._rest = data.rpartition(b"\n")
        for line in parse_lines(whole + newline):
            self._known = _merged(self._known, line)
        return self._known

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _note_of(state: State, finish: Finish | None) -> RunNote:
    failure = state.failure if finish is None else finish.failure
    return RunNote(
        # The supervisor is done before the launcher has closed.
        phase="ended" if finish is not None else state.phase,
        failure="" if failure is None else failure.text,
        stopped_by=state.stopped_by or "",
        workers={name: _note_of_worker(state.worker(name)) for name in state.unit_of},
    )


def _note_of_worker(worker: WorkerState) -> WorkerNote:
    ended = worker.ended
    started_s = time.time() - (time.monotonic() - worker.started_s)
    return WorkerNote(
        phase=worker.phase,
        restarts=worker.attempt,
        since_s=round(started_s, 1),
        outcome="" if ended is None else ended.exited.outcome,
        error="" if ended is None or ended.exited.error is None else ended.text,
    )


def _merged(known: RunNote, line: Mapping[str, Any]) -> RunNote:
    changed = {name: WorkerNote(**note) for name, note in line["workers"].items()}
    return RunNote(workers={**known.workers, **changed}, **line["run"])


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
