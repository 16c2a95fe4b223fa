"""Outcomes of ops, and which of them are awaited together: no sleeps."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.controller.islands.protocol import (
    Call,
    Computation,
    Drop,
    OrderList,
    Put,
    Send,
)
from replicator.controller.islands.waiting.dispatched import DispatchedOp, WaitingThread
from replicator.controller.islands.waiting.outcome import Outcome, wait_for_error

LIMIT_S = 60
ERROR = ValueError("no")


def test_who_waits_gets_the_error_of_the_end():
    outcome = Outcome()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(outcome.exception) for _ in range(2)]
        outcome.end(ERROR)
        assert [each.result(LIMIT_S) for each in waiting] == [ERROR, ERROR]


def test_a_wait_that_is_too_short_ends_and_does_no_harm():
    outcome = Outcome()
    with pytest.raises(TimeoutError):
        outcome.exception(0.0)
    assert outcome.end().exception() is None


def test_what_follows_is_called_once_before_and_after_the_end_whatever_it_raises():
    outcome, called = Outcome(), []
    outcome.then(lambda: called.append(1 / 0))
    outcome.then(lambda: called.append("before"))
    outcome.end()
    outcome.then(lambda: called.append("after"))
    assert called == ["before", "after"]


def test_an_error_is_found_while_another_has_not_ended():
    assert wait_for_error([Outcome(), Outcome().end(ERROR)]) is ERROR


class Token:
    """Is there once it may be, and says when it was waited for."""

    def __init__(self, name, waited, go=None):
        self.name, self.waited, self.go = name, waited, go

    def block_until_ready(self):
        assert self.go is None or self.go.wait(LIMIT_S)
        self.waited.append(self.name)


def waited_for(are_passing):
    """Return what was waited for, by ops that were all there."""
    waited, done, go = [], [], threading.Event()

    def do(op):
        op.wait()
        done.append(op.name)

    thread = WaitingThread("wait", do)
    for name, is_passing in enumerate([False, *are_passing]):
        token = Token(name, waited, None if name else go)
        op = DispatchedOp(run=0, outputs=(), inputs=(), name=name, line="", token=token)
        op.is_passing = is_passing
        thread.put(op)
    go.set()
    thread.close()
    assert done == sorted(done)
    return waited


def test_of_a_chain_the_last_is_awaited_first():
    assert waited_for([True, True, False, False]) == [0, 3, 1, 2, 3, 4]


def test_a_chain_whose_end_is_not_there_is_done():
    assert waited_for([True, True]) == [0, 2, 1, 2]


def computation(places=(0,), *, is_host=False):
    return Computation(
        name="op",
        line="",
        places=places,
        run=list,
        shapes=[],
        inputs=[],
        outputs=[],
        is_host=is_host,
    )


def call(given, *made, on=None):
    return Call(computation=on or computation(), inputs=(given,), outputs=made)


def drop(*values):
    return Drop(values=values)


SEND = Send(input=1, output=9, places=(0,), target="b", sources=(0,), targets=(0,))


@pytest.mark.parametrize(
    ("orders", "passing"),
    [
        ([call(0, 1), call(1, 2), drop(1), call(2, 3), drop(2)], {1, 2}),
        ([call(0, 1), call(1, 2)], set()),  # it is a result
        ([call(0, 1), SEND, call(1, 2), drop(1)], set()),
        ([call(0, 1), call(0, 2), drop(1), drop(2)], set()),  # the next does without
        ([call(0, 3, 1), SEND, call(3, 2), drop(3, 1)], set()),  # one of two
        ([call(0, 1), call(1, 2, on=computation((1,))), drop(1)], set()),
        ([call(0, 1), call(1, 2, on=computation(is_host=True)), drop(1)], set()),
        (
            [call(0, 1), Put(output=5, places=(0,), layout=None), call(1, 2), drop(1)],
            set(),
        ),
    ],
)
def test_a_value_passes_if_the_next_call_takes_it_and_nothing_waits(orders, passing):
    assert OrderList(orders=orders).passing == passing
