"""Time pieces of work against each other in one run, and say how sure a ratio is.

Cores that others share drift by more than what is looked for. So the pieces take turns,
a round is one block of each, and only ratios within a round are compared. Their median
ignores a disturbed round; its bounds come from the bootstrap (Efron 1979, "Bootstrap
methods", percentile intervals): the median of rounds drawn anew, with replacement.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replicator.base.host.clock import Clock, SystemClock

_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A median over rounds, with one-sided 95 % bounds.

    Attributes:
      median: Of the rounds.
      low: The true median is above this, in 95 % of experiments.
      high: It is below this, likewise.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Write it as `1.002 (0.9971 to 1.008)`."""
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


def time_rounds(
    blocks: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Run the blocks in turn, round after round, after one round of warming up.

    Args:
      blocks: By name; each returns when its work is done.
      rounds: How often each is timed.
      clock: Where the time comes from.

    Returns:
      By name, the seconds of each round.
    """
    clock = clock or SystemClock()
    for run in blocks.values():
        run()
    times_s: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, run in blocks.items():
            times_s[name].append(seconds(run, clock))
    return times_s


def seconds(run: Callable[[], object], clock: Clock | None = None) -> float:
    """Return how long `run()` takes."""
    clock = clock or SystemClock()
    started_s = clock.now_s()
    run()
    return clock.now_s() - started_s


def ratio(times_s: Sequence[float], others_s: Sequence[float]) -> Estimate:
    """Estimate how many times as long the first takes as the second."""
    return estimate(np.divide(times_s, others_s))


def ratio_of_medians(times_s: Sequence[float], others_s: Sequence[float]) -> Estimate:
    """Estimate how many times as long the first takes, median by median.

    Where single times are disturbed, and not whole rounds, it is surer than `ratio`.
    """
    times, others = np.asarray(times_s, float), np.asarray(others_s, float)
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(times), size=(_RESAMPLES, len(times)))
    ratios = np.median(times[drawn], axis=1) / np.median(others[drawn], axis=1)
    return Estimate(
        median=float(np.median(times) / np.median(others)),
        low=float(np.quantile(ratios, 1 - _CONFIDENCE)),
        high=float(np.quantile(ratios, _CONFIDENCE)),
    )


def estimate(rounds: Sequence[float] | np.ndarray, *, seed: int = 0) -> Estimate:
    """Estimate the median of what each round measured.

    Args:
      rounds: One number per round.
      seed: Of the rounds that are drawn anew.
    """
    values = np.asarray(rounds, float)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(values, size=(_RESAMPLES, len(values)))
    medians = np.median(drawn, axis=1)
    return Estimate(
        median=float(np.median(values)),
        low=float(np.quantile(medians, 1 - _CONFIDENCE)),
        high=float(np.quantile(medians, _CONFIDENCE)),
    )
