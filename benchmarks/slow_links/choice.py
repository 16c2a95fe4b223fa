"""A choice by `decide`, of candidates that are compiled: by predictions and trials."""

from collections.abc import Callable, Mapping

from replicator.strategies import StepTime, Strategy
from replicator.strategies.choose import (
    Candidate,
    Checked,
    Compiled,
    Event,
    Search,
    Timed,
    decide,
)

_TRIALS = 5
_TURNS = 3


def choose(
    strategies: Mapping[str, Strategy],
    predicted: Mapping[str, StepTime],
    trial_s: Callable[[str], float],
) -> str:
    """Return the name of the strategy that is chosen.

    Args:
      strategies: The candidates by name; each fits.
      predicted: By name, the time of a step by the model.
      trial_s: Measures the seconds of a step of a candidate.
    """

    def event_of(verb: str, name: str) -> Event:
        if verb == "compile":
            return Compiled(name=name, program=name, predicted=predicted[name])
        if verb == "check":
            return Checked(name=name, result="ungated", why="not what is measured")
        return Timed(name=name, seconds=trial_s(name))

    candidates = tuple(
        Candidate(name=name, strategy=strategy, predicted=predicted[name])
        for name, strategy in strategies.items()
    )
    search = Search(candidates=candidates, trials=_TRIALS, turns=_TURNS)
    search, action = decide(search)
    while action.verb != "end":
        assert action.name is not None, "it is about a candidate"
        search, action = decide(search, event_of(action.verb, action.name))
    assert action.name is not None, "all of them fit"
    return action.name
