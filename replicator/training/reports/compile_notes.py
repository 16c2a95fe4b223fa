"""Tell what was compiled, and what a step of it costs: who watches, and the journal."""

from collections.abc import Callable, Sequence

from replicator.engine.program_cost import Compilation
from replicator.hooks.protocol import Hook, MetricsEvent
from replicator.monitoring.display import Display
from replicator.monitoring.events import EventLog


class TellCompilations(Hook):
    """Tell each compilation of a step once, with the metrics of the step after it.

    A display gets a line, `compiled in 3.2 s · 1.4 GFLOP/step · …`. The journal gets
    one event, `compiled` for the first and `recompiled` for all others.

    Put it before the hook that reports progress, so that its line comes first.

    Args:
      compilations: Returns the step's compilations so far.
      display: Closed by whoever else uses it.
      events: The journal.
      told: How many of them were told by another.
    """

    def __init__(
        self,
        compilations: Callable[[], Sequence[Compilation]],
        *,
        display: Display | None = None,
        events: EventLog | None = None,
        told: int = 0,
    ):
        self._compilations = compilations
        self._display = display
        self._events = events
        self._told = told

    def on_metrics(self, event: MetricsEvent) -> None:
        """Tell what is new."""
        for compilation in self._compilations()[self._told :]:
            self._tell(compilation, event.step)

    def _tell(self, compilation: Compilation, step: int) -> None:
        kind = "recompiled" if self._told else "compiled"
        self._told += 1
        if self._display is not None:
            self._display.note(str(compilation))
        if self._events is not None:
            self._events.write(
                kind,
                step=step,
                seconds=round(compilation.seconds, 3),
                **compilation.per_step(),
            )
