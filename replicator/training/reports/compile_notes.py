"""Report each compilation, and the cost of a step, to the display and the journal."""

import dataclasses
from collections.abc import Callable, Sequence

from replicator.engine.program_cost import Compilation
from replicator.hooks.protocol import Hook, MetricsEvent
from replicator.monitoring.display import Display
from replicator.monitoring.events import EventLog


@dataclasses.dataclass(eq=False)
class ReportCompilations(Hook):
    """Report each compilation of a step once, with the metrics of the step after it.

    A display gets a line, `compiled in 3.2 s · 1.4 GFLOP/step · …`. The journal gets
    one event, `compiled` for the first and `recompiled` for all others.

    Put it before the hook that reports progress, so that its line comes first.

    Attributes:
      compilations: Returns the step's compilations so far.
      display: Display of the run; not closed here.
      events: Journal of the run.
      reported: Number of compilations that were reported.
    """

    compilations: Callable[[], Sequence[Compilation]]
    _: dataclasses.KW_ONLY
    display: Display | None = None
    events: EventLog | None = None
    reported: int = 0

    def on_metrics(self, event: MetricsEvent) -> None:
        """Report new compilations."""
        for compilation in self.compilations()[self.reported :]:
            self._report(compilation, event.step)

    def _report(self, compilation: Compilation, step: int) -> None:
        kind = "recompiled" if self.reported else "compiled"
        self.reported += 1
        if self.display is not None:
            self.display.note(str(compilation))
        if self.events is not None:
            self.events.write(
                kind,
                step=step,
                seconds=round(compilation.seconds, 3),
                **compilation.per_step(),
            )
