"""Longest time that each phase of a run may take before the watchdog ends it."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from replicator.errors import check_positive
from replicator.monitoring.phases import Phase

MEDIANS = 10.0
"""Longest step, in medians of the steps before it."""

LEAST_STEP_S = 60.0
"""Least limit of a step, in seconds, however fast the others were."""

ENOUGH_STEPS = 3
"""Number of step times from which on the median counts, and not `first_step_s`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Longest time of each phase of a run, in seconds.

    `float("inf")` sets no limit.

    Attributes:
      step_s: Between two finished steps; None means ten times the running median, at
        least 60.
      first_step_s: The first steps, which wait until all processes have compiled.
      start_s: Until the first compilation.
      restore_s: Reading a checkpoint.
      compile_s: One compilation.
      input_s: Waiting for one batch; None means 1.5 times the input's own timeout
        (`InputOptions.timeout_s`), whose error explains more.
      save_s: Waiting for one checkpoint.
      evaluate_s: One evaluation.
      report_s: Metrics, displays, and the user's own hooks.
      end_s: All after the last step.
      silent_s: Without a heartbeat of another process, while this one waits for it.
      interpreter_s: Without a turn of the watchdog's own thread, as code holds the
        interpreter's lock. Then C code writes the stacks, and ends the process with
        code 1. A process that was stopped for longer (Ctrl-Z) ends like that, too. It
        uses the only timer of `faulthandler.dump_traceback_later`; infinite leaves
        that to you.

    Raises:
      ArgumentError: A limit is not a positive number.
    """

    step_s: float | None = None
    first_step_s: float = 600.0
    start_s: float = 1800.0
    restore_s: float = 1800.0
    compile_s: float = 3600.0
    input_s: float | None = None
    save_s: float = 1800.0
    evaluate_s: float = 7200.0
    report_s: float = 600.0
    end_s: float = 1800.0
    silent_s: float = 60.0
    interpreter_s: float = 600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if value is field.default is None:
                continue
            check_positive(field.name, value, "Use `float('inf')` for no limit.")

    def of(self, phase: Phase, step_times_s: Sequence[float] = ()) -> float:
        """Return the limit of `phase`, after steps that took `step_times_s`.

        >>> Limits().of("step", [20.0] * 3)
        200.0
        """
        if phase != "step":
            limit_s = getattr(self, f"{phase}_s")
            return math.inf if limit_s is None else limit_s
        if self.step_s is not None:
            return self.step_s
        if len(step_times_s) < ENOUGH_STEPS:
            return self.first_step_s
        return max(LEAST_STEP_S, MEDIANS * statistics.median(step_times_s))

    def for_input(self, timeout_s: float) -> "Limits":
        """Return these limits for an input with the given timeout.

        >>> Limits().for_input(40.0).input_s
        60.0
        """
        if self.input_s is not None:
            return self
        return dataclasses.replace(self, input_s=1.5 * timeout_s)

    @property
    def tick_s(self) -> float:
        """Seconds between observations: a tenth of the shortest limit, at most 1."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        shortest = min((v for v in values if v is not None), default=math.inf)
        return min(1.0, max(0.02, shortest / 10))


def as_limits(step_timeout: float | Limits | None) -> Limits:
    """Return `step_timeout` as limits; a number is the limit of a step.

    >>> as_limits(5.0).step_s
    5.0

    Raises:
      ArgumentError: `step_timeout` is not a positive number.
    """
    if isinstance(step_timeout, Limits):
        return step_timeout
    if step_timeout is None:
        return Limits()
    remedy = "Leave it out for ten times the median, or use `float('inf')`."
    check_positive("step_timeout", step_timeout, remedy)
    return Limits(step_s=step_timeout)
