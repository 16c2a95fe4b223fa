"""A choice among candidates: by predictions first, then by trials in turns."""

from collections.abc import Callable, Mapping

from benchmarks.slow_links.models import PLAIN
from replicator.strategies import StepTime, Strategy

_TRIAL_TURNS = 2
_MOST_TRIALS = 4
_WORTH_A_TRIAL = 3.0
"""Ratio to the least prediction above which a candidate is not tried."""
_ALWAYS_TRIED = (PLAIN, "fsdp")


def choose(
    strategies: Mapping[str, Strategy],
    predicted: Mapping[str, StepTime],
    trial_s: Callable[[str], float],
) -> str:
    """Return the name of a strategy, chosen by predictions and then by trials.

    Args:
      strategies: The candidates by name.
      predicted: By name, the time of a step by the model.
      trial_s: Measures the seconds of a step of a candidate.
    """
    ranked = sorted(strategies, key=lambda name: predicted[name].high_s)
    longest_s = _WORTH_A_TRIAL * predicted[ranked[0]].high_s
    tried = [name for name in ranked if predicted[name].high_s <= longest_s]
    tried = list(dict.fromkeys([*tried[:_MOST_TRIALS], *_ALWAYS_TRIED]))
    turns = [{name: trial_s(name) for name in tried} for _ in range(_TRIAL_TURNS)]
    return min(tried, key=lambda name: min(turn[name] for turn in turns))
