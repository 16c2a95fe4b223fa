"""Hooks: schedules as decisions, and the four that come with the loop."""

import itertools

import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.hooks import (
    Callback,
    Every,
    MetricsEvent,
    Report,
    StateCallback,
    StateEvent,
    WriteMetrics,
    every,
)
from replicator.monitoring.progress import ProgressNumbers
from tests.fakes import RecordingWriter


def numbers(step, time_s):
    return ProgressNumbers(
        step=step,
        steps=None,
        time_s=time_s,
        elapsed_s=time_s,
        compile_s=1.0,
        steps_per_s=2.0,
        examples_per_s=64.0,
        eta_s=None,
        input_stall_share=None,
    )


class Reads:
    """Metrics of a step, and how often they were asked for."""

    def __init__(self, **metrics):
        self.metrics = {name: np.asarray(value) for name, value in metrics.items()}
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.metrics


def metrics_event(step, *, time_s=0.0, reads=None):
    return MetricsEvent(
        step=step,
        advanced=1,
        examples=32 * step,
        progress=numbers(step, time_s),
        read_metrics=reads or Reads(loss=float(step)),
    )


def state_event(step, *, advanced=1, state=None):
    return StateEvent(
        step=step,
        advanced=advanced,
        examples=32 * step,
        progress=numbers(step, 0.0),
        read_state=lambda: state,
    )


def due_steps(schedule, events):
    last_s, due = None, []
    for event in events:
        last_s, is_due = schedule.decide(last_s, event)
        due += [event.step] if is_due else []
    return due


def test_every_n_steps_is_due_at_multiples():
    events = [metrics_event(step) for step in range(1, 11)]
    assert due_steps(every(n_steps=3), events) == [3, 6, 9]


def test_every_n_steps_is_due_at_multiples_after_a_resume():
    events = [metrics_event(step) for step in range(8, 14)]
    assert due_steps(every(n_steps=5), events) == [10]


def test_a_call_of_several_steps_is_due_if_it_reaches_a_multiple():
    events = [state_event(step, advanced=4) for step in range(4, 25, 4)]
    assert due_steps(every(n_steps=6), events) == [8, 12, 20, 24]


def test_every_seconds_is_due_once_they_have_passed():
    events = [metrics_event(step, time_s=100 + 0.4 * step) for step in range(1, 9)]
    assert due_steps(every(seconds=1.0), events) == [4, 7]


def test_steps_and_seconds_are_due_whichever_comes_first():
    times = [0.0, 0.1, 0.2, 5.0, 5.1, 5.2, 5.3]
    events = [metrics_event(i, time_s=time_s) for i, time_s in enumerate(times, 1)]
    assert due_steps(every(n_steps=3, seconds=4.0), events) == [3, 4, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            "`every` must have `n_steps` or `seconds`, got neither. "
            "Write `every(n_steps=100)`.",
        ),
        (
            {"n_steps": 0},
            "`n_steps` must be at least 1, got 0. Leave a hook out to stop it.",
        ),
        (
            {"seconds": 0.0},
            "`seconds` must be above 0, got 0.0. Use `n_steps=1` for each step.",
        ),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        every(**arguments)
    assert str(caught.value) == message


def test_callbacks_get_due_events_only():
    seen = []
    on_metrics, on_state = (
        Callback(
            lambda event: seen.append(float(event.metrics["loss"])), Every(2, None)
        ),
        StateCallback(lambda event: seen.append(event.state), Every(3, None)),
    )
    for step, hook in itertools.product(range(1, 5), [on_metrics, on_state]):
        hook.on_metrics(metrics_event(step))
        hook.on_state(state_event(step, state=f"state {step}"))
    assert seen == [2.0, "state 3", 4.0]


def test_metrics_are_not_read_between_due_steps():
    hook, reads = WriteMetrics(RecordingWriter(), every(n_steps=3)), Reads(loss=1.0)
    hook.on_metrics(metrics_event(1, reads=reads))
    hook.on_metrics(metrics_event(2, reads=reads))
    assert reads.count == 0
    hook.on_metrics(metrics_event(3, reads=reads))
    assert reads.count == 1


def test_metrics_are_written_with_the_rates_that_are_known():
    writer = RecordingWriter()
    WriteMetrics(writer, every(n_steps=1)).on_metrics(metrics_event(1))
    assert writer.rows == [
        (1, {"loss": 1.0, "progress/steps_per_s": 2.0, "progress/examples_per_s": 64.0})
    ]


@pytest.mark.parametrize(("last", "steps"), [(6, [3, 6]), (7, [3, 6, 7])])
def test_the_last_step_is_written_once(last, steps):
    writer = RecordingWriter()
    hook = WriteMetrics(writer, every(n_steps=3))
    for step in range(1, last + 1):
        hook.on_metrics(metrics_event(step))
    hook.on_end(state_event(last))
    hook.close()
    assert writer.steps == steps
    assert writer.calls[-2:] == ["flush", "close"]


def test_a_run_that_failed_closes_the_writer_without_a_last_row():
    writer = RecordingWriter()
    hook = WriteMetrics(writer, every(n_steps=3))
    hook.on_metrics(metrics_event(1))
    hook.close()
    assert writer.calls == ["close"]


class RecordingDisplay:
    interval_s = 5.0

    def __init__(self):
        self.shown = []
        self.closed = False

    def show(self, numbers, scalars):
        self.shown.append((numbers.step, scalars))

    def close(self):
        self.closed = True


def test_a_report_shows_the_first_the_last_and_some_between():
    display = RecordingDisplay()
    hook = Report(display)
    for step in range(1, 10):
        hook.on_metrics(metrics_event(step, time_s=2.0 * step))
    hook.on_end(state_event(9))
    hook.close()
    assert [step for step, _ in display.shown] == [1, 4, 7, 9]
    assert display.closed


def test_a_report_shows_scalars_only():
    display = RecordingDisplay()
    reads = Reads(loss=0.5, per_replica=[1.0, 2.0])
    Report(display).on_metrics(metrics_event(1, reads=reads))
    assert display.shown == [(1, {"loss": 0.5})]
