"""What watchdogs make of each other: who is slow, and who is to blame for a hang."""

import dataclasses
import json

import pytest

from replicator.training.watchdog.hang_report import (
    Statement,
    format_hang_report,
    lagging,
)
from replicator.training.watchdog.heartbeats import Heartbeats
from replicator.training.watchdog.peers import (
    Beat,
    find_straggler,
    follow,
)
from tests.fakes import Board, FakeClock


def beat(step, own_s, count=1):
    return Beat(count=count, phase="step", step=step, seconds=1.0, own_s=own_s)


def straggler(*own_s, steps=10):
    before = [beat(100, 50.0)] * len(own_s)
    now = [beat(100 + steps, 50.0 + seconds * steps) for seconds in own_s]
    return find_straggler(before, now)


def test_the_slowest_is_named_if_it_takes_half_as_long_again_as_the_median():
    found = straggler(0.10, 0.11, 0.30, 0.09)
    assert (found.rank, found.own_s) == (2, pytest.approx(0.30))
    assert found.median_s == pytest.approx(0.10)


@pytest.mark.parametrize(
    "own_s",
    [(0.10, 0.14), (0.1,), (0.0, 0.0005), (0.1, 0.1, 0.1)],
    ids=["nearly as fast", "alone", "less than a millisecond", "equal"],
)
def test_nobody_is_named_among_processes_that_are(own_s):
    assert straggler(*own_s) is None


def test_of_two_the_slow_one_is_measured_by_the_other():
    assert straggler(0.10, 0.16).rank == 1


def test_nobody_is_named_before_every_process_made_a_step():
    assert find_straggler([beat(1, 0), None], [beat(2, 1), beat(2, 9)]) is None
    assert straggler(0.1, 0.9, steps=0) is None


def test_a_beat_says_the_same_on_the_other_side():
    said = json.loads(json.dumps(dataclasses.asdict(beat(3, 0.5))))
    assert Beat(**said) == beat(3, 0.5)


def test_a_beat_that_stands_still_is_as_old_as_when_it_was_first_seen():
    old, new = beat(1, 0, count=1), beat(1, 0, count=2)
    known = follow((), [old, None], 10.0)
    known = follow(known, [old, None], 15.0)
    assert known == ((old, 10.0), (None, 10.0))
    assert follow(known, [new, old], 20.0) == ((new, 20.0), (old, 20.0))


def said(step, phase="step", limit_s=None, **more):
    fields = {"seconds": 61.0, "where": "train.py:3 in f", "also": (), "stacks": None}
    return Statement(phase=phase, step=step, limit_s=limit_s, **(fields | more))


@pytest.mark.parametrize(
    ("statements", "behind"),
    [
        ([said(5), said(4)], (1,)),
        ([said(5), None, said(4)], (1,)),
        ([said(5), said(5, "input")], (1,)),
        ([said(5), said(5)], ()),
        ([said(5, "input"), said(5, "input")], ()),
        ([said(5)], ()),
        ([said(7, in_callback=True), said(5), said(5, "report")], (0,)),
        ([said(5, in_callback=True), said(5, in_callback=True)], ()),
    ],
    ids=[
        *["fewer steps", "silent", "elsewhere", "both wait", "both read", "alone"],
        *["devices wait for a callback", "all call"],
    ],
)
def test_who_is_behind(statements, behind):
    assert lagging(statements) == behind


def test_the_message_says_what_happened_who_is_behind_and_what_to_do():
    statements = [
        said(5, limit_s=60.0, stacks="/run/stacks/0-5.txt"),
        said(4, where="data.py:7 in read", also=("train.py:9 in callback",)),
        None,
    ]
    assert format_hang_report(statements, silent_s=10.0).splitlines() == [
        "replicator: no progress; the last step begun is 5. Ending all 3 processes "
        "with exit code 76: start again, and the run goes on from its last checkpoint.",
        "  process 0: in `step` for 61.0 s (limit 60 s), step 5, at train.py:3 in f",
        "    stacks: /run/stacks/0-5.txt",
        "  process 1: in `step` for 61.0 s, step 4, at data.py:7 in read",
        "    also at train.py:9 in callback",
        "  process 2: no answer for 10 s  <- behind",
        "  Look first at what holds up process 2.",
    ]


def test_a_statement_says_the_same_on_the_other_side():
    one = said(5, also=["a.py:1 in f"])
    assert Statement(**json.loads(json.dumps(dataclasses.asdict(one)))) == one


class Group:
    """The heartbeats of three processes, turned by hand."""

    def __init__(self):
        self.clock, self.stragglers = FakeClock(), []
        self.beats = [beat(0, 0.0)] * 3
        board = Board(3)
        self.all_heartbeats = [
            self._heartbeats(board.of(process)) for process in range(3)
        ]

    def turn(self, count=1):
        for heartbeats in reversed(self.all_heartbeats):
            heartbeats._turn(count)

    def _heartbeats(self, notices):
        def own_beat(count):
            own = self.beats[notices.process]
            return dataclasses.replace(own, count=count)

        return Heartbeats(
            notices,
            clock=self.clock,
            beat=own_beat,
            every_s=1.0,
            on_straggler=self.stragglers.append,
        )


def test_process_0_names_the_straggler_once_a_minute():
    group = Group()
    group.turn(1)
    group.turn(2)
    for _ in range(2):
        group.clock.advance(61)
        step, own_s = group.beats[0].step + 10, group.beats[1].own_s
        group.beats = [beat(step, 1.0), beat(step, own_s + 5.0), beat(step, 1.0)]
        group.turn(3)
        group.turn(4)
    assert [found.rank for found in group.stragglers] == [1, 1]
    assert group.stragglers[0].own_s == pytest.approx(0.5)


def test_peers_are_read_only_when_somebody_wants_them():
    group = Group()
    group.turn(1)
    assert group.all_heartbeats[1].status.peers == ()
    group.all_heartbeats[1].wants_peers = True
    group.turn(2)
    group.all_heartbeats[1]._turn(3)
    group.clock.advance(5)
    group.all_heartbeats[1]._turn(4)
    peers = group.all_heartbeats[1].status.peers
    assert [peer.process for peer in peers] == [0, 2]
    assert [peer.silent_s for peer in peers] == [5.0, 5.0]


def test_what_one_says_of_a_hang_all_hear():
    group = Group()
    group.all_heartbeats[2].publish("hung", {"step": 3})
    group.turn(1)
    group.turn(2)
    assert [heartbeats.status.hung for heartbeats in group.all_heartbeats] == [
        (None, None, {"step": 3})
    ] * 3
