"""Open what a run tells and where: progress, metrics, the record, the journal."""

import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
from replicator.monitoring.events import was_killed
from replicator.monitoring.run_record import (
    describe_process,
    first_updates,
    is_same_run,
    set_aside,
    write_run_record,
)
from replicator.training.checkpoint_hook import Resumed
from replicator.training.reports.compile_notes import TellCompilations
from replicator.training.reports.journal import written
from replicator.training.reports.phase_journal import JournalPhases
from replicator.training.reports.profiler import Profile
from replicator.training.reports.run_numbers import AddRunNumbers
from replicator.training.run_spec import RunSpec
from replicator.writers.directory import directory_writer
from replicator.writers.jsonl import drop_after
from replicator.writers.writer import Writer

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reports:
    """What is open.

    Attributes:
      hooks: To be called before all others; their states are saved.
      after: To be called after all others, so that their time is noted, too.
      writer: Where rows go; None if nowhere.
    """

    hooks: Sequence[Hook] = ()
    after: Sequence[Hook] = ()
    writer: Writer | None = None


@contextmanager
def alone(spec: RunSpec) -> Iterator[None]:
    """Keep other runs out of a run's directory: two in one journal read as one.

    Args:
      spec: The run; without a directory nobody is kept out. Of several processes the
        first holds the lock for all: should it die, the system gives it back.

    Raises:
      CheckpointInUseError: Another run writes there; in all processes.
    """
    directory = spec.recording.directory
    lock = WriterLock(directory or Path(), Disk(), name=".records")

    def acquire() -> None:
        with suppress(OSError):  # told by what is written there next
            if directory is not None:
                lock.acquire(above=0)

    group = Group(together=spec.together, timeout_s=600.0)
    try:
        group.lead("directory", acquire)
        yield
    finally:
        lock.release()


def open_reports(spec: RunSpec, resumed: Resumed) -> Reports:
    """Open what this process tells; of those that share a mesh, the first tells most.

    Args:
      spec: What the run is made of.
      resumed: Where it goes on.
    """
    records, events, start_step = spec.recording, spec.events, resumed.start_step
    is_fresh = start_step == 0 and not spec.recovery.went_back
    processes = exchange("run-record", describe_process()) if spec.together else None
    profile: list[Hook] = []
    if records.directory is not None:
        folder = records.directory / "profile"
        profile = [Profile(folder, steps=records.profile, events=events)]
    if spec.together and jax.process_index() > 0:
        return Reports(after=profile)

    def compilations() -> Sequence[Compilation]:
        return getattr(spec.step, "compilations", ())  # a debugged one has none

    # A process without standard error has none to show anything on.
    display = make_display() if records.display and sys.stderr else None
    if start_step and display is not None:
        display.note(_goes_on(spec.arguments, start_step))
    elif start_step and start_step >= (spec.plan.steps or math.inf):
        _log.warning(_goes_on(spec.arguments, start_step))
    # A run that went back has told them before: its step is the same.
    told = len(compilations()) if spec.recovery.went_back else 0
    telling = TellCompilations(compilations, display=display, events=events, told=told)
    hooks: list[Hook] = [telling]
    if display is not None:
        hooks.append(Report(display))
    if records.directory is None or events is None:
        return Reports(hooks=hooks)
    seed = resumed.began.get("seed", spec.seed)
    said = {"seed": seed, "arguments": spec.arguments}
    checked = first_updates(records.directory)
    with written(records.directory, is_fresh=is_fresh):
        if is_fresh:
            # One that was killed before it was saved begins anew, in one journal.
            again = is_same_run(records.directory, **said)
            again = again and was_killed(records.directory)
            set_aside(records.directory, but_journal=again)
            checked = checked if again else {}
        else:
            # What came after the last checkpoint is done again, and written again.
            path = records.directory / "metrics.jsonl"
            drop_after(path, step=start_step)
        write_run_record(
            records.directory, **said, processes=processes, checked=checked
        )
    events.write("resumed" if start_step else "started", step=start_step)
    writer = AddRunNumbers(
        directory_writer(records.directory),
        spec.phases,
        compilations=compilations,
        devices=list(spec.mesh.devices.flat),
    )
    when = every(n_steps=records.write_every)
    return Reports(
        hooks=[*hooks, WriteMetrics(writer, when)],
        after=[*profile, JournalPhases(events, spec.phases, start_step=start_step)],
        writer=writer,
    )


def _goes_on(arguments: Mapping[str, Any], step: int) -> str:
    """Say what nobody sees who starts a script again, and did not think of before."""
    place, steps = arguments.get("checkpoint_dir"), arguments.get("steps")
    if steps is not None and step >= steps:
        return f"nothing left to do: {place} holds step {step} of {steps}"
    return f"goes on after step {step}, from {place}"
