"""Runs: errors reach all results behind them at once, and no others."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.controller.future import Pending
from replicator.controller.islands.waiting.room import room_for
from replicator.controller.runs import Runs

ERROR = ValueError("no")


@pytest.fixture
def runs():
    return Runs()


def start(runs, behind, results, inputs=None, room=None):
    pending = {number: Pending() for number in results}
    behind = {value: frozenset(those) for value, those in behind.items()}
    room = room or room_for(64)
    number = runs.start(behind, pending, inputs or {}, lambda number: None, room)
    return number, pending


def test_an_error_reaches_what_depends_on_it_while_other_inputs_run(runs):
    number, pending = start(runs, {0: {2}, 1: {2, 3}}, [2, 3])
    runs.report(number, [0], ERROR)
    assert pending[2].done.exception() is ERROR
    assert not pending[3].done.done()


def test_an_error_reaches_runs_that_take_a_result(runs):
    first, pending = start(runs, {0: {0}}, [0])
    _, taking = start(runs, {5: {6}}, [6, 7], {5: pending[0]})
    runs.report(first, [0], ERROR)
    assert taking[6].done.exception() is ERROR
    assert not taking[7].done.done()


def test_a_result_that_has_failed_fails_what_takes_it_later(runs):
    first, pending = start(runs, {0: {0}}, [0])
    runs.report(first, [0], ERROR)
    _, taking = start(runs, {5: {6}}, [6], {5: pending[0]})
    assert taking[6].done.exception() is ERROR


def test_one_run_too_many_waits_until_another_is_done():
    runs, room = Runs(), room_for(1)
    first, _ = start(runs, {}, [0], room=room)
    second = ThreadPoolExecutor(1).submit(start, runs, {}, [0], room=room)
    assert not second.done()
    runs.report(first, [0], None)
    assert second.result(60)[0] == first + 1


def test_the_first_error_stays(runs):
    number, pending = start(runs, {0: {1}, 1: {1}}, [1])
    runs.report(number, [0], ERROR)
    runs.report(number, [1], KeyError())
    assert pending[1].done.exception() is ERROR
