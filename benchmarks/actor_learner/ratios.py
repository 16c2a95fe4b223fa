"""Ratios of the windows of all ways of working. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.actor_learner.window import Window
from benchmarks.timing import Estimate, estimate


def budget_us(windows: Mapping[str, Sequence[Window]]) -> dict[str, float]:
    """Return the processor time of an environment step, by what it is spent on."""

    def median(values: Sequence[float]) -> float:
        return 1e6 * float(np.median(values))

    acting, taking = windows["acting"], windows["taking"]
    parts = {
        "environment": median([each.stepping_s / each.acted for each in acting]),
        "inference": median(
            [(each.actors_s - each.stepping_s) / each.acted for each in acting]
        ),
        "insert": median(
            [
                each.actors_s / each.acted - bare.actors_s / bare.acted
                for each, bare in zip(taking, acting, strict=True)
            ]
        ),
        "take": median([each.learner_s / each.trained for each in taking]),
        "learn": median([each.learner_s / each.trained for each in windows["updates"]]),
    }
    whole = median(
        [
            each.actors_s / each.acted + each.learner_s / each.trained
            for each in windows["program"]
        ]
    )
    parts["rest"] = whole - sum(parts.values())
    return parts


def cpu_ratios(windows: Mapping[str, Sequence[Window]]) -> list[float]:
    """Return, of each round, bare processor time over the program's."""
    return [
        (
            program.acted * acting.actors_s / acting.acted
            + program.trained * updates.learner_s / updates.trained
        )
        / (program.actors_s + program.learner_s)
        for acting, updates, program in zip(
            windows["acting"], windows["updates"], windows["program"], strict=True
        )
    ]


def bridge_cpu_ratios(windows: Mapping[str, Sequence[Window]]) -> list[float]:
    """Return, of each round, bare acting's processor time over the data plane's."""
    return [
        taking.acted
        * ((acting.actors_s + again.actors_s) / (acting.acted + again.acted))
        / (taking.actors_s + taking.learner_s)
        for acting, taking, again in zip(
            windows["acting"], windows["taking"], windows["again"], strict=True
        )
    ]


def ratios(windows: Mapping[str, Sequence[Window]]) -> dict[str, Estimate]:
    """Return the numbers that have bars, but for RLlib's."""

    def rates(name: str, what: str) -> np.ndarray:
        return np.array([getattr(each, what) for each in windows[name]])

    acting, again = rates("acting", "acted_per_s"), rates("again", "acted_per_s")
    return {
        "bridge_ratio": estimate(2 * rates("taking", "acted_per_s") / (acting + again)),
        "bridge_cpu_ratio": estimate(bridge_cpu_ratios(windows)),
        "aa_ratio": estimate(again / acting),
        "cpu_ratio": estimate(cpu_ratios(windows)),
        "async_over_sync": estimate(
            rates("waiting", "trained_per_s") / rates("in_turn", "trained_per_s")
        ),
    }
