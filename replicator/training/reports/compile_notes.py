"""Report each compilation, and the cost of a step, to the display and the journal."""

from collections.abc import Callable, Sequence

from replicator.engine.program_cost import Compilation
from replicator.hooks.protocol import Hook, MetricsEvent
from replicator.monitoring.display import Display
from replicator.monitoring.events import EventLog


class ReportCompilations(Hook):
    """Report each compilation of a step once, with the metrics of the step after it.

    A display gets a line, `compiled in 3.2 s · 1.4 GFLOP/step · …`. The journal gets
    one event, `compiled` for the first and `recompiled` for all others.

    Put it before the hook that reports progress, so that its line comes first.

    Args:
      compilations: Returns the step's compilations so far.
      display: Display of the run; not closed here.
      events: Journal of the run.
      reported: Number of compilations that were reported before.
    """

    def __init__(
        self,
        compilations: Callable[[], Sequence[Compilation]],
        *,
        display: Display | None = None,
        events: EventLog | None = None,
        reported: int = 0,
    ):
        self._compilations = compilations
        self._display = display
        self._events = events
        self._reported = reported

    def on_metrics(self, event: MetricsEvent) -> None:
        """Report new compilations."""
        for compilation in self._compilations()[self._reported :]:
            self._report(compilation, event.step)

    def _report(self, compilation: Compilation, step: int) -> None:
        kind = "recompiled" if self._reported else "compiled"
        self._reported += 1
        if self._display is not None:
            self._display.note(str(compilation))
        if self._events is not None:
            self._events.write(
                kind,
                step=step,
                seconds=round(compilation.seconds, 3),
                **compilation.per_step(),
            )
