"""Hooks that write and show the numbers of steps on a schedule."""

from replicator.hooks.protocol import Hook, MetricsEvent, StateEvent
from replicator.hooks.schedule import Every, Scheduled, Trigger, every
from replicator.monitoring.display import Display
from replicator.writers.writer import Writer, check_writer, named_numbers


class WriteMetrics(Scheduled, Hook):
    """Write a step's numbers, and the rates as `progress/...`.

    The last step of a run is written, too. The writer is closed with the run.

    Args:
      writer: Writer of the numbers.
      when: Schedule; its steps are met exactly.
    """

    def __init__(self, writer: Writer, when: Every | None = None):
        check_writer("writer", writer)
        self._writer = writer
        self._trigger = Trigger(when or every(n_steps=10))
        self._unwritten: MetricsEvent | None = None

    def on_metrics(self, event: MetricsEvent) -> None:
        """Write the numbers if due."""
        self._unwritten = event
        if self._trigger.pulled(event):
            self._write(event)

    def on_end(self, event: StateEvent) -> None:
        """Write the last step."""
        if self._unwritten is not None:
            self._write(self._unwritten)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._unwritten = None
        self._writer.close()

    def flush(self) -> None:
        """Return when all that was written is on the disk."""
        self._writer.flush()

    def _write(self, event: MetricsEvent) -> None:
        self._unwritten = None
        rates = {
            "progress/steps_per_s": event.progress.steps_per_s,
            "progress/examples_per_s": event.progress.examples_per_s,
            "progress/input_stall_share": event.progress.input_stall_share,
        }
        known = {name: rate for name, rate in rates.items() if rate is not None}
        self._writer.write(event.step, named_numbers(event.metrics) | known)


class Report(Hook):
    """Show the first step, the last, and those between at the display's interval.

    Args:
      display: See `replicator.monitoring.display.make_display`.
      when: Schedule; the display's own interval by default.
    """

    def __init__(self, display: Display, when: Every | None = None):
        self._display = display
        self._trigger = Trigger(when or every(seconds=display.interval_s))
        self._shown_step: int | None = None
        self._newest: MetricsEvent | None = None

    def on_metrics(self, event: MetricsEvent) -> None:
        """Show the numbers if due."""
        self._newest = event
        if self._trigger.pulled(event) or self._shown_step is None:
            self._show(event)

    def on_end(self, event: StateEvent) -> None:
        """Show the last step."""
        if self._newest is not None and self._newest.step != self._shown_step:
            self._show(self._newest)

    def close(self) -> None:
        """Close the display."""
        self._newest = None
        self._display.close()

    def _show(self, event: MetricsEvent) -> None:
        self._shown_step = event.step
        scalars = named_numbers(event.metrics, max_ndim=0)
        self._display.show(event.progress, scalars)
