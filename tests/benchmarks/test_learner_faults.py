"""The judge of runs that lost a worker sees what must not happen."""

import dataclasses

import pytest

from benchmarks.runs.killed_learner import Outcome, cases, problems
from benchmarks.runs.learner_program import BATCH, STEPS, UNROLL

PLAYED = {"environment_steps": 0.75 * STEPS * BATCH * UNROLL, "episodes": 9}


def result(*, updates=STEPS, played=PLAYED, statistics=None):
    return {
        **{"step": STEPS, "variables": {"updates": updates}},
        **{"metrics": played, "statistics": statistics or {}},
    }


def lines(attempt, steps, lag=1.0):
    common = {"attempt": attempt, "time_s": 0.0}
    updates = [{"what": "update", "step": step, **common} for step in steps]
    return [*updates, {"what": "lag", "step": steps[0], "lag": lag, **common}]


def outcome(**changes):
    """Return a run whose learner was killed after update 57 and went back to 50."""
    good = Outcome(
        lines=lines(0, range(1, 58)) + lines(1, range(51, STEPS + 1)),
        result=result(),
        restarts={"learner": 1},
        killed_s=-1.0,
        durable=50,
    )
    return dataclasses.replace(good, **changes)


REPLAYED = result(
    played={"inserted": 64, "episodes": 9},
    statistics={"priorities": {"sent": 8, "nonfinite": 0, "lost": 0}},
)
IN_TURNS = result(
    played={"inserted": 500, "episodes": 9},
    statistics={"priorities": {"nonfinite": 0}, "table": {"turns": {}}},
)
BAD = {
    "other bits|did not end": {"problem": "It did not end."},
    "and 121 updates at its end": {"result": result(updates=STEPS + 1)},
    "played": {"result": result(played=PLAYED | {"environment_steps": 1.0})},
    "played {'inserted': 64": {"result": REPLAYED},
    "played {'inserted': 500": {"result": IN_TURNS},
    "was not started again": {"restarts": {}},
    "made the updates": {"lines": lines(0, [1, 2, 2, 3])},
    "57 were done, 50 durable": {
        "lines": lines(0, range(1, 58)) + lines(1, range(41, STEPS + 1))
    },
    "update 59: 57 were done": {
        "lines": lines(0, range(1, 58)) + lines(1, range(59, STEPS + 1))
    },
    "a policy lag of -3": {"lines": lines(0, range(1, STEPS + 1), lag=-3.0)},
}


def test_a_run_that_went_on_from_its_checkpoint_is_right():
    assert problems(outcome(), "learner") == []


def test_a_kill_after_the_last_update_starts_nobody_again():
    assert problems(outcome(restarts={}, killed_s=1.0), "learner") == []


@pytest.mark.parametrize("what", BAD)
def test_what_must_not_happen_is_found(what):
    (found,) = problems(outcome(**BAD[what]), "learner")
    assert any(each in found for each in what.split("|"))


def test_each_worker_of_each_program_is_among_the_cases():
    victims = {(case.shape.turns, case.victim) for case in cases()}
    learners = {"learner", "learner/0", "learner/1"}
    assert {v for turns, v in victims if turns} == learners | {
        "actor/0",
        "queue",
        "replay",
    }
    free = {victim for turns, victim in victims if not turns}
    assert free == learners | {"actor/0", "queue", "inference", "replay"}
