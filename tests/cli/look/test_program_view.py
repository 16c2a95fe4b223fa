import pytest

from replicator.cli.look.program_view import (
    HEADER,
    last_line,
    line_above,
    line_below,
    lines_of,
)
from replicator.launchpad_bridge.view.watching.columns import duration, rate, size
from replicator.launchpad_bridge.view.watching.samples import (
    MethodSample,
    ProgramSample,
    WorkerSample,
)


def method(calls_per_s=0.0, **changes):
    known = {
        "calls": 7,
        "errors": 0,
        "bytes_per_s": 2e6,
        "p50_s": 2e-5,
        "p99_s": 3e-3,
        "queued": 1,
        "running": 2,
    }
    return MethodSample(calls_per_s=calls_per_s, **{**known, **changes})


def worker(name="learner", *, methods=None, **changes):
    known = {
        "label": name.split("/")[0],
        "kind": "CourierNode",
        "text": "Learner",
        "state": "running",
        "outcome": "",
        "restarts": 0,
        "since_s": 100.0,
        "error": "",
        "answers": None if methods is None else True,
        "made_per_s": 0.0,
        "calls_per_s": sum(m.calls_per_s for m in (methods or {}).values()),
        "bytes_per_s": 2e6,
        "p50_s": 2e-5,
        "p99_s": 3e-3,
        "queued": 1,
        "running": 2,
    }
    return WorkerSample(name=name, methods=methods or {}, **{**known, **changes})


def snapshot(*workers, **changes):
    known = {"phase": "running", "failure": "", "stopped_by": ""}
    return ProgramSample(
        program="training",
        run_id="ab",
        pid=7,
        at_s=112.0,
        workers=workers,
        edges=[],
        **{**known, **changes},
    )


def test_a_row_tells_state_calls_times_traffic_and_queue():
    (row,) = lines_of(snapshot(worker(methods={"push": method(1234.0)}, restarts=3)))
    assert len(row) == len(HEADER)
    assert " ".join(row) == "learner running 3 - 1,234 20 µs 3.00 ms 2.00 MB 1 2"


def test_several_methods_have_a_row_each_below_their_worker():
    methods = {"pull": method(1.0), "push": method(2.0), "unused": method(calls=0)}
    names = [row[0] for row in lines_of(snapshot(worker(methods=methods)))]
    assert names == ["learner", "  pull", "  push"]


def test_a_worker_without_a_server_has_no_numbers():
    (row,) = lines_of(snapshot(worker()))
    assert row == ("learner", "running", "0", *["-"] * 7)


def test_a_server_that_is_silent_is_said_to_be():
    (row,) = lines_of(snapshot(worker(answers=False)))
    assert row[4] == "no answer"


def test_who_has_ended_says_how():
    (row,) = lines_of(snapshot(worker(state="ended", outcome="died")))
    assert row[1] == "died"


def test_what_does_not_fit_is_told_by_worker_then_by_group():
    methods = {"a": method(1.0), "b": method(2.0)}
    states = ["running", "running", "waiting"]
    actors = [
        worker(f"actors/{i}", methods=methods, state=state)
        for i, state in enumerate(states)
    ]
    shown = snapshot(worker(), *actors)
    assert [len(lines_of(shown, room)) for room in (10, 9, 4, 3, 1)] == [10, 4, 4, 2, 2]
    row = lines_of(shown, 3)[1]
    assert row[:5] == ("actors (3 nodes)", "2 running, 1 waiting", "0", "-", "9.00")


def test_a_group_without_servers_has_no_numbers():
    callers = worker("a/0", made_per_s=10.0), worker("a/1", made_per_s=15.0)
    row = lines_of(snapshot(*callers), 1)[0]
    assert row[:4] == ("a (2 nodes)", "running", "0", "25.0")
    assert set(row[4:]) == {"-"}


def test_which_program_it_is_stands_above():
    assert line_above(snapshot(worker())) == (
        "training: running, 1 node, for 12.0 s, launched by process 7"
    )
    stopping = snapshot(worker(), worker(), phase="stopping", stopped_by="learner")
    assert "stopping (asked by learner), 2 nodes" in line_above(stopping)


def test_what_went_wrong_stands_below():
    assert line_below(snapshot(worker())) == ""
    assert line_below(snapshot(worker(), failure="`a` died")) == "failed: `a` died"
    waiting = worker(state="waiting", error="`learner` raised X")
    assert line_below(snapshot(waiting)) == "last: `learner` raised X"


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"failure": "`a` died"}, "training failed: `a` died"),
        ({"stopped_by": "learner"}, "training was stopped by learner."),
        ({}, "training ended: all nodes have returned."),
    ],
)
def test_how_it_ended_is_the_last_word(changes, end):
    done = worker(state="ended", outcome="returned")
    assert last_line(snapshot(done, phase="ended", **changes)) == end


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        (duration, 1.2e-5, "12 µs"),
        (duration, 0.0123, "12.3 ms"),
        (duration, 1.5, "1.50 s"),
        (duration, 600, "10 min"),
        (duration, 9000, "2.5 h"),
        (size, 0, "0 B"),
        (size, 999, "999 B"),
        (size, 1234, "1.23 kB"),
        (size, 5e12, "5.00 TB"),
        (rate, 0, "0"),
        (rate, 0.5, "0.50"),
        (rate, 45678.4, "45,678"),
    ],
)
def test_numbers_have_the_unit_that_fits(write, number, text):
    assert write(number) == text
