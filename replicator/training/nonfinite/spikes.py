"""Find a number that leaps, by median and MAD, which outliers hardly move.

MAD is the median distance from the median; 1.4826 times it estimates the standard
deviation of normal numbers (Rousseeuw & Croux, 1993). Spikes join the window, too: a
new level becomes the usual one after half a window.
"""

import dataclasses
import math
import statistics
from typing import get_args

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    check_count,
    check_positive,
    check_text,
    check_word,
)
from replicator.training.nonfinite.policy import OnSpike
from replicator.writers.writer import named_numbers

_LEAST = 10  # values before the first spike can be found
_PER_MAD = 1.4826
_LEAST_SPREAD = 1e-3  # of the median: numbers may all be equal, and their MAD 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spikes:
    """Watch a metric for spikes: values far above what is usual.

    Attributes:
      metric: Name of the metric in the records: `loss`, `gradient_norm`.
      factor: Least number of standard deviations above the median of a spike.
      window: Number of steps before that the median is taken over.
      action: `"log"` writes the spike into the run's journal, `"raise"` ends the run
        with `SpikeError`, `"rollback"` goes back to the last checkpoint before it and
        leaves its batch out.

    Raises:
      ArgumentError: A number is out of range, or `action` is unknown.
    """

    metric: str = "loss"
    factor: float = 10.0
    window: int = 100
    action: OnSpike = "log"

    def __post_init__(self) -> None:
        check_text("metric", self.metric)
        check_positive("factor", self.factor, "Use 10.")
        check_count("window", self.window, "Use 100.", least=_LEAST)
        check_word("action", self.action, get_args(OnSpike))

    def decide(
        self, seen: tuple[float, ...], value: float
    ) -> tuple[tuple[float, ...], str | None]:
        """Decide whether `value` is a spike.

        >>> Spikes().decide((2.0,) * 10, 9.0)[1]
        '9 where 2 ± 0.002 is usual'

        Args:
          seen: The values before it, at most `window`.
          value: The next value. NaN and infinity are not spikes: they are reported as
            such.

        Returns:
          The values for the next call, and a description of the spike, or None.
        """
        if not math.isfinite(value):
            return seen, None
        after = (*seen, value)[-self.window :]
        if len(seen) < _LEAST:
            return after, None
        median = statistics.median(seen)
        distance = statistics.median(abs(each - median) for each in seen)
        spread = max(_PER_MAD * distance, _LEAST_SPREAD * abs(median))
        if value - median <= self.factor * spread:
            return after, None
        return after, f"{value:.6g} where {median:.6g} ± {spread:.2g} is usual"

    def value_in(self, metrics: PyTree) -> float:
        """Return the watched number among a step's metrics.

        >>> Spikes().value_in({"loss": 2.0})
        2.0

        Raises:
          ArgumentError: It is missing.
        """
        numbers = named_numbers(metrics)
        if self.metric not in numbers:
            raise ArgumentError(
                f"`metric` must be one that the step reports, got {self.metric!r} and "
                f"{', '.join(map(repr, numbers)) or 'no metrics'}. Use one of these."
            )
        return numbers[self.metric]
