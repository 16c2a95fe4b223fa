"""The judge of runs that lost a worker sees what must not happen."""

import dataclasses

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from benchmarks.runs.killed_learner import Outcome, cases, problems
from benchmarks.runs.learner_program import BATCH, STEPS, UNROLL
from benchmarks.runs.table_save import TableSave, read_save

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
SAVE = TableSave(keys=[7, 8, 9], counts={"inserted": 5, "full": 2})
LATER = TableSave(keys=[8, 9, 3], counts={"inserted": 6, "full": 3})
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
    "1 of 2 rows that a table saved were lost": {
        "saves": [SAVE, LATER._replace(keys=[9, 3])]
    },
    "`inserted` of the table went from 5 back to 4": {
        "saves": [SAVE, LATER._replace(counts={"inserted": 4, "full": 3})]
    },
    "a policy lag of -3": {"lines": lines(0, range(1, STEPS + 1), lag=-3.0)},
}


def test_a_run_that_went_on_from_its_checkpoint_is_right():
    assert problems(outcome(), "learner") == []


def test_a_kill_after_the_last_update_starts_nobody_again():
    assert problems(outcome(restarts={}, killed_s=1.0), "learner") == []


def test_rows_that_were_removed_since_a_save_are_not_lost():
    assert problems(outcome(saves=[SAVE, LATER]), "learner") == []


def test_a_save_is_read_with_its_rows_and_counts(tmp_path):
    table = lp.ReplayTable(
        4,
        sampler=lp.fifo(),
        max_times_sampled=1,
        checkpoint_dir=tmp_path,
        checkpoint_every_s=600,
    )
    assert read_save(tmp_path) == TableSave(keys=[], counts={})
    for _ in range(3):
        table.insert({"reward": np.ones(2, np.float32)}, actor="a", version=0)
    table.save()
    saved = read_save(tmp_path)
    assert saved.keys == list(table.take(4, timeout_s=60.0).keys)
    assert (saved.counts["inserted"], saved.counts["full"]) == (6, 2)


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
