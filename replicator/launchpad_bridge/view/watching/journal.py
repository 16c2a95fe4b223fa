"""What a run notes of itself in its folder: a line whenever a worker starts or ends.

    {"at_s": …, "run": {"phase": "running", …}, "workers": {"actors/3": {…}}}

The first line has all workers, each later one those that changed. So a run that nobody
looks at pays for a short write where a worker starts or ends, and for nothing between.
Who looks on keeps the file open, and so reads the last line of a run whose folder is
gone already: how it ended.
"""

import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from replicator.distributed.processes.states import Finish, State, WorkerState

JOURNAL = "states.jsonl"
"""In the run's folder, beside the program's description."""
_LONGEST_LINE_BYTES = 1 << 24
_LOG = logging.getLogger("replicator.launchpad_bridge")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNote:
    """How a worker is, in the words of the supervisor.

    Attributes:
      phase: "running", "waiting" for its restart, or "ended".
      restarts: How often it was started again.
      since_s: When this start was, in seconds since 1970.
      outcome: How it ended last, as `Exited` has it; "" before.
      error: What it ended with, in a line; "" for nothing.
    """

    phase: str
    restarts: int
    since_s: float
    outcome: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """How a run is.

    Attributes:
      phase: "starting", "running", "stopping", "killing" or "ended".
      failure: What failed first, in a line; "" for nothing.
      stopped_by: Who asked for the stop; "" for nobody.
      workers: By name.
    """

    phase: str = "starting"
    failure: str = ""
    stopped_by: str = ""
    workers: Mapping[str, WorkerNote] = dataclasses.field(default_factory=dict)


@final
class RunJournal:
    """Writes the notes of one run; in one thread.

    A line is one write at the file's end. Of a launcher that dies in it a reader sees a
    line without an end, and waits for the rest.
    """

    def __init__(self, folder: Path) -> None:
        """Note in a folder; nothing is written yet."""
        self._path = folder / JOURNAL
        self._noted = RunNote()

    def note(self, state: State | None, finish: Finish | None) -> None:
        """Write what has changed; a disk that is full ends no run."""
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
            _append(self._path, f"{json.dumps(line)}\n".encode())
        except OSError as error:
            _LOG.warning(
                "What the run does cannot be noted in %s: %s", self._path, error
            )


@final
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
        """Return how the run is."""
        *lines, self._rest = (self._rest + self._file.read(_LONGEST_LINE_BYTES)).split(
            b"\n"
        )
        for line in lines:
            self._known = _merged(self._known, json.loads(line))
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


def _append(path: Path, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
