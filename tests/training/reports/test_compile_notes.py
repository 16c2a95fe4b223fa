"""Compilations are told once each: on a display, and in the journal."""

import io

from replicator.engine.program_cost import Compilation, ProgramCost
from replicator.hooks import MetricsEvent
from replicator.monitoring.display import LineDisplay
from replicator.monitoring.events import EventLog, read_events
from replicator.monitoring.progress import Progress
from replicator.training.reports.compile_notes import ReportCompilations
from tests.fakes import FakeClock

COMPILATION = Compilation(
    seconds=2.0,
    steps_per_call=1,
    cost=ProgramCost(
        flops=3_000_000, collective_bytes=0, bytes_accessed=None, memory=None
    ),
)


def metrics_event(step):
    numbers = Progress(FakeClock(), steps=None).update(step=1, examples=0, stall_s=0.0)
    return MetricsEvent(
        step=step, advanced=1, examples=1, progress=numbers, read_metrics=dict
    )


def test_each_compilation_is_told_once(tmp_path):
    stream, compiled = io.StringIO(), []
    hook = ReportCompilations(
        lambda: compiled, display=LineDisplay(stream), events=EventLog(tmp_path)
    )
    for step in range(1, 6):
        if step in (1, 4):
            compiled.append(COMPILATION)
        hook.on_metrics(metrics_event(step))
    assert stream.getvalue() == "compiled in 2.0 s · 3 MFLOP/step\n" * 2
    first, second = read_events(tmp_path)
    assert (first["kind"], first["step"]) == ("compiled", 1)
    assert (second["kind"], second["step"]) == ("recompiled", 4)
    assert (second["seconds"], second["flops"]) == (2.0, 3_000_000)


def test_without_display_and_journal_nobody_is_told():
    ReportCompilations(lambda: [COMPILATION]).on_metrics(metrics_event(1))
