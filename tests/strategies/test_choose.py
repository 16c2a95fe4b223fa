"""The choice of a strategy as a state machine: no device, no clock."""

import dataclasses
import functools
import math

import pytest

from replicator.strategies.choose import (
    Candidate,
    CandidateFailed,
    Checked,
    Compiled,
    HalfTime,
    NoTimeLeft,
    Search,
    Timed,
    cannot_win,
    decide,
)
from replicator.strategies.cost import StepTime
from replicator.strategies.strategy import Strategy


def candidate(name, seconds=1.0, **fields):
    found = StepTime(arithmetic_s=seconds, memory_s=0.0, links_s={"host": 0.0})
    strategy = Strategy(name=name)
    return Candidate(name=name, strategy=strategy, predicted=found, **fields)


def searched(*candidates, seconds=None, answers=None, **options):
    """Run a search whose steps take `seconds`; return it, its winner, its actions."""
    seconds, answers = seconds or {}, answers or {}
    search, action = decide(Search(candidates=candidates, **options))
    done = []
    while action.verb != "end":
        done.append((action.verb, action.name))
        answer = answers.get(done[-1]) or PLAIN[action.verb]
        assert action.name is not None
        search, action = decide(search, answer(search.of(action.name), seconds))
    return search, action.name, done


def compiled(found, seconds, **fields):
    del seconds
    about = {"program": found.name, "need_bytes": 10, "predicted": found.predicted}
    return Compiled(**{"name": found.name, **about, **fields})


PLAIN = {
    "compile": compiled,
    "check": lambda found, seconds: Checked(name=found.name, result="same"),
    "time": lambda found, seconds: Timed(
        name=found.name, seconds=seconds.get(found.name, 1.0)
    ),
}


def status(search, name):
    return search.of(name).status


def test_what_is_fastest_when_timed_wins_whatever_the_model_says():
    slow, fast = candidate("fsdp", 1.0), candidate("zero1", 9.0)
    search, winner, _ = searched(slow, fast, seconds={"fsdp": 2.0, "zero1": 1.0})
    assert winner == "zero1"
    assert search.of("fsdp").why == "2.00 x the best"


def test_without_trials_the_model_decides_and_nothing_runs():
    two = candidate("fsdp", 2.0), candidate("zero1", 1.0)
    _, winner, done = searched(*two, trials=0)
    assert winner == "zero1"
    assert {verb for verb, _ in done} == {"compile"}


def test_data_parallel_and_fsdp_are_timed_however_slow_the_model_says_they_are():
    others = [candidate(f"zero1 {n}", 0.1) for n in range(4)]
    slow = candidate("data_parallel", 9.0), candidate("fsdp", 9.0)
    _, _, done = searched(*others, *slow, trials=3)
    timed = {name for verb, name in done if verb == "time"}
    assert timed == {"data_parallel", "fsdp", "zero1 0"}


def test_what_by_its_bound_may_still_be_the_best_is_compiled():
    hidden = candidate("hidden", 9.0, bound_s=0.5)
    others = candidate("fsdp", 1.0), candidate("beaten", 9.0, bound_s=2.0)
    search, _, done = searched(*others, hidden, trials=0)
    assert done == [("compile", "fsdp"), ("compile", "hidden")]
    assert status(search, "beaten") == "left out"


def test_at_half_time_no_more_is_compiled_but_what_is_there_is_timed():
    answers = {("compile", "zero2"): lambda *_: HalfTime()}
    three = candidate("fsdp"), candidate("zero2", 2.0), candidate("zero3", 3.0)
    search, winner, done = searched(*three, answers=answers)
    assert ("time", "fsdp") in done
    assert (winner, status(search, "zero3")) == ("fsdp", "left out")


def test_a_state_that_cannot_fit_is_not_compiled():
    big = candidate("data_parallel", least_bytes=1000)
    search, winner, done = searched(big, candidate("fsdp"), memory_bytes=500)
    assert (winner, status(search, "data_parallel")) == ("fsdp", "does not fit")
    assert ("compile", "data_parallel") not in done


@pytest.mark.parametrize(("need", "fits"), [(95, True), (96, False)])
def test_compiled_memory_must_leave_five_per_cent(need, fits):
    answers = {
        ("compile", "fsdp"): functools.partial(compiled, need_bytes=need),
    }
    search, *_ = searched(candidate("fsdp"), answers=answers, memory_bytes=100)
    assert (status(search, "fsdp") == "chosen") == fits


def test_equal_programs_are_timed_once():
    answers = {
        ("compile", name): functools.partial(compiled, program="a")
        for name in ("fsdp", "hybrid(shard=8)")
    }
    two = candidate("fsdp"), candidate("hybrid(shard=8)")
    search, winner, _ = searched(*two, answers=answers)
    assert winner == "fsdp"
    assert search.of("hybrid(shard=8)").why == "as fsdp"


@pytest.mark.parametrize("verb", ["compile", "check", "time"])
def test_a_failure_is_named_and_the_search_goes_on(verb):
    def fails(found, seconds):
        return CandidateFailed(name=found.name, why="RESOURCE_EXHAUSTED")

    two = candidate("fsdp"), candidate("zero2")
    search, winner, _ = searched(*two, answers={(verb, "zero2"): fails})
    assert winner == "fsdp"
    assert search.of("zero2").why == "RESOURCE_EXHAUSTED"


def test_one_that_fails_makes_room_for_the_next():
    three = candidate("fsdp"), candidate("zero2", 2.0), candidate("hybrid", 3.0)
    answers = {("check", "zero2"): lambda *_: CandidateFailed(name="zero2", why="NaN")}
    _, _, done = searched(*three, trials=2, answers=answers)
    assert ("time", "hybrid") in done


def test_the_reference_is_the_first_of_data_parallel_zero1_and_fsdp_that_fits():
    three = candidate("fsdp"), candidate("zero1"), candidate("zero2")
    search, _, done = searched(*three)
    assert search.of("zero1").gate == "reference"
    assert [name for verb, name in done if verb == "check"] == ["fsdp", "zero2"]


def test_without_a_reference_all_are_ungated():
    search, _, done = searched(candidate("zero2"), candidate("hybrid(shard=4)"))
    assert "check" not in {verb for verb, _ in done}
    assert search.of("zero2").gate == "ungated"


def test_one_whose_update_differs_cannot_win():
    answers = {
        ("check", "zero2"): lambda *_: Checked(
            name="zero2", result="differs", why="`params` is off"
        )
    }
    two = candidate("fsdp"), candidate("zero2")
    search, winner, _ = searched(*two, answers=answers, seconds={"zero2": 0.1})
    assert (winner, status(search, "zero2")) == ("fsdp", "differs")


def test_turns_alternate_and_stop_when_the_rest_cannot_win():
    two = candidate("fsdp"), candidate("zero2")
    _, _, done = searched(*two, seconds={"fsdp": 2.0})
    assert [name for verb, name in done if verb == "time"] == ["fsdp", "zero2"] * 3


def test_turns_end_where_two_are_as_fast():
    _, _, done = searched(candidate("fsdp"), candidate("zero2"), turns=4)
    assert sum(verb == "time" for verb, _ in done) == 8


def test_a_lead_that_is_within_the_noise_does_not_count():
    assert not cannot_win([1.1, 0.9, 1.2], [1.0, 1.15, 0.95])
    assert cannot_win([1.3, 1.4, 1.35], [1.0, 1.15, 0.95])


def test_where_none_is_faster_data_parallel_is_chosen():
    two = candidate("data_parallel"), candidate("fsdp")
    _, winner, _ = searched(*two, seconds={"data_parallel": 1.0, "fsdp": 1.0})
    assert winner == "data_parallel"


def test_without_time_the_best_so_far_is_chosen():
    answers = {("time", "zero2"): lambda *_: NoTimeLeft()}
    search, winner, _ = searched(
        candidate("fsdp"), candidate("zero2", 0.1), answers=answers
    )
    assert winner == "fsdp"  # the only one that was timed
    assert math.isinf(search.of("zero2").least_s)


def test_nothing_that_fits_is_no_winner():
    search, winner, _ = searched(candidate("fsdp", least_bytes=9), memory_bytes=1)
    assert winner is None
    assert status(search, "fsdp") == "does not fit"


def test_without_figures_what_sends_fewer_bytes_is_compiled_and_timed():
    def sends(name, count):
        found = Candidate(name=name, strategy=Strategy(name=name))
        return dataclasses.replace(found, link_bytes={"host": count})

    def answer(found, seconds):
        return compiled(found, seconds, link_bytes=found.link_bytes)

    many = (("data_parallel", 8), ("fsdp", 12), ("zero1", 12), ("int8", 2))
    every = [sends(*each) for each in many]
    answers = {("compile", each.name): answer for each in every}
    _, winner, done = searched(*every, answers=answers, trials=2, seconds={"int8": 0.5})
    assert winner == "int8"
    assert ("compile", "zero1") not in done
