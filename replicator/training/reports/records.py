"""Open the reports of a run: progress, metrics, the run record, the journal."""

import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from replicator.checkpoint.disk import Disk
from replicator.checkpoint.group import Group
from replicator.checkpoint.lock import WriterLock
from replicator.distributed.agreement import exchange
from replicator.engine.program_cost import Compilation
from replicator.hooks.metric_hooks import Report, WriteMetrics
from replicator.hooks.protocol import Hook
from replicator.hooks.schedule import every
from replicator.monitoring.display import make_display
from replicator.monitoring.events import EventLog, was_killed
from replicator.monitoring.run_record import (
    describe_process,
    first_updates,
    is_same_run,
    set_aside,
    write_run_record,
)
from replicator.training.checkpoint_hook import Resumed
from replicator.training.reports.compile_notes import ReportCompilations
from replicator.training.reports.journal import written
from replicator.training.reports.phase_journal import JournalPhases
from replicator.training.reports.profiler import Profile
from replicator.training.reports.recording import Recording
from replicator.training.reports.run_numbers import AddRunNumbers
from replicator.training.reports.uploads import LOCK_STEM, UploadRecords
from replicator.training.run_spec import RunSpec
from replicator.writers.directory import directory_writer
from replicator.writers.jsonl import drop_after
from replicator.writers.writer import Writer

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reports:
    """Open reports of a run.

    Attributes:
      hooks: Hooks to call before all others; their states are saved.
      after: Hooks to call after all others, so that those are timed, too.
      writer: Writer of metric rows; None for none.
    """

    hooks: Sequence[Hook] = ()
    after: Sequence[Hook] = ()
    writer: Writer | None = None


@contextmanager
def alone(spec: RunSpec) -> Iterator[None]:
    """Lock a run's directory: two runs in one journal would read as one.

    Args:
      spec: The run; without a directory nothing is locked. Of several processes the
        first holds the lock for all: if it dies, the system releases it. In a bucket
        the newest run has the right to write.

    Raises:
      BucketError: The bucket is not there, refused us, or did not answer.
      CheckpointInUseError: Another run writes there; in all processes.
    """
    directory, uploads = spec.recording.directory, spec.recording.uploads
    lock = WriterLock(directory or Path(), Disk(), name=LOCK_STEM)

    def acquire() -> tuple[str, str] | None:
        with suppress(OSError):  # raised again by the first write there
            if directory is not None:
                lock.acquire(above=0)
        return None if uploads is None else uploads.acquire()

    group = Group(together=spec.together, timeout_s=600.0)
    try:
        tokens = group.lead("directory", acquire)
        if uploads is None:
            yield
        else:
            with written(uploads.folder, is_fresh=True):
                group.gather("fetched", lambda: uploads.fetch(*tokens))
            with uploads:
                yield
    finally:
        lock.release()


def open_reports(spec: RunSpec, resumed: Resumed) -> Reports:
    """Open the reports of this process; only the first of several writes metrics.

    Args:
      spec: The run.
      resumed: Point at which it resumes.
    """
    records, events, start_step = spec.recording, spec.events, resumed.start_step
    is_fresh = start_step == 0 and not spec.recovery.went_back
    processes = exchange("run-record", describe_process()) if spec.together else None
    if spec.together and jax.process_index() > 0:
        return Reports(after=_profiling(records, events))

    def compilations() -> Sequence[Compilation]:
        return getattr(spec.step, "compilations", ())  # a debug step has none

    # A process may have no standard error.
    display = make_display() if records.display and sys.stderr else None
    if start_step and display is not None:
        display.note(_goes_on(spec, resumed))
    elif start_step and start_step >= (spec.plan.steps or math.inf):
        _log.warning(_goes_on(spec, resumed))
    # A run that went back has reported them before: its step is the same.
    reported = len(compilations()) if spec.recovery.went_back else 0
    hooks: list[Hook] = [
        ReportCompilations(
            compilations, display=display, events=events, reported=reported
        )
    ]
    if display is not None:
        hooks.append(Report(display))
    if records.directory is None or events is None:
        return Reports(hooks=hooks)
    about = {"seed": resumed.began.seed, "arguments": spec.arguments}
    checked = first_updates(records.directory)
    with written(records.directory, is_fresh=is_fresh):
        if is_fresh:
            # A run killed before its first save begins anew, in the same journal.
            again = is_same_run(records.directory, **about)
            again = again and was_killed(records.directory)
            set_aside(records.directory, but_journal=again)
            checked = checked if again else {}
        else:
            # Steps after the last checkpoint are made again, and written again.
            path = records.directory / "metrics.jsonl"
            drop_after(path, step=start_step)
        write_run_record(
            records.directory, **about, processes=processes, checked=checked
        )
    _write_beginning(events, resumed)
    writer = AddRunNumbers(
        directory_writer(records.directory),
        spec.phases,
        compilations=compilations,
        devices=list(spec.mesh.devices.flat),
    )
    return Reports(
        hooks=[*hooks, *_writing(records, writer)],
        # After what may fail: the profiler takes a signal until it is closed.
        after=[
            *_profiling(records, events),
            JournalPhases(events, spec.phases, start_step=start_step),
        ],
        writer=writer,
    )


def _profiling(records: Recording, events: EventLog | None) -> list[Hook]:
    if records.directory is None:
        return []
    folder = records.directory / "profile"
    return [Profile(folder, steps=records.profile, events=events)]


def _writing(records: Recording, writer: Writer) -> list[Hook]:
    written_by = WriteMetrics(writer, every(n_steps=records.write_every))
    if records.uploads is None:
        return [written_by]
    return [written_by, UploadRecords(records.uploads)]  # in this order


def _write_beginning(events: EventLog, resumed: Resumed) -> None:
    if step := resumed.start_step:
        events.write("resumed", step=step, source=resumed.source)
    else:
        events.write("started", step=step)


def _goes_on(spec: RunSpec, resumed: Resumed) -> str:
    """Describe a resumed run, for a user who starts a script again."""
    place = spec.checkpointing and spec.checkpointing.directory
    step = resumed.start_step
    if resumed.source == "memory":
        place = "the memory of its launcher"
    if (steps := spec.plan.steps) is not None and step >= steps:
        return f"nothing left to do: {place} holds step {step} of {steps}"
    return f"goes on after step {step}, from {place}"
