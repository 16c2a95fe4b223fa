"""Island of another process, as its controller has it: reports, and what it keeps."""

import threading
import weakref

import numpy as np
import pytest

from replicator.controller.islands.protocol import (
    IslandMessage,
    OrderList,
    Put,
    Receive,
)
from replicator.controller.islands.remote import RemoteIsland
from replicator.controller.layouts import SliceLayout
from replicator.errors import ArgumentError, RpcError

LIMIT_S = 60
LAYOUT = SliceLayout(axes=(("devices", 1),))
PUT = OrderList(orders=[Put(output=0, places=(0,), layout=None)])


class ScriptedClient:
    """Answers what a test says."""

    def __init__(self, take, reports):
        self.answers = {"take": take, "reports": reports, "leave": lambda: None}

    def call(self, method, args, timeout_s=None):
        return self.answers[method]()

    def close(self):
        pass


def island(client, report):
    return RemoteIsland(
        "island0",
        [],
        client=client,
        session="",
        platform="cpu",
        report=report,
        lost_after_s=LIMIT_S,
        lost=lambda name, error: None,
    )


def message(value):
    return IslandMessage(number=0, run=7, order_list=PUT, inputs={}, values={0: value})


def test_what_was_failed_with_a_lost_island_is_not_reported_again():
    found, failed = [], threading.Event()

    def report(run, values, error):
        found.append((run, list(values), error is None))
        failed.set()

    def lost():
        raise RpcError("gone")

    def late():
        assert failed.wait(LIMIT_S)
        return [False, [[7, [0], None, 0.0]], []]

    opened = island(ScriptedClient(lost, late), report)
    opened.submit(message(np.ones(2)))
    opened.close()
    assert found == [(7, [0], False)]


class Tracked(np.ndarray):
    """Array of NumPy that a weak reference may be made to."""


def test_an_array_that_was_sent_is_not_kept_and_what_was_not_read_is_refused():
    closed = threading.Event()
    client = ScriptedClient(lambda: None, lambda: [closed.wait(LIMIT_S), [], []])
    opened = island(client, lambda *_: None)
    freed = threading.Event()
    value = np.ones(2).view(Tracked)
    weakref.finalize(value, freed.set)
    opened.submit(message(value))
    del value
    assert freed.wait(LIMIT_S)
    closed.set()
    opened.close()
    with pytest.raises(ArgumentError, match="open to read"):
        opened.read([(7, 0)])


def test_a_value_that_is_received_is_none_that_an_island_reports():
    got = Receive(
        output=1, places=(0,), senders=(0,), source="island1", shape=(2,), layout=LAYOUT
    )
    assert OrderList(orders=[*PUT.orders, got]).outputs == {0: "put"}


def test_what_was_asked_for_and_came_is_read_without_a_message():
    reported, closed = threading.Event(), threading.Event()
    answers = [
        [False, [[7, [0], None, 0.0]], [[[[7, 0]], [np.ones(2)]]]],
        [True, [], []],
    ]

    def reports():
        assert asked.wait(LIMIT_S)
        if len(answers) == 1:
            assert closed.wait(LIMIT_S)
        return answers.pop(0)

    asked = threading.Event()
    client = ScriptedClient(lambda: None, reports)  # it knows no "read"
    opened = island(client, lambda *_: reported.set())
    opened.submit(message(np.ones(2)))
    opened.ask([(7, 0)])
    asked.set()
    assert reported.wait(LIMIT_S)
    assert opened.read([(7, 0)])[0].tolist() == [1.0, 1.0]
    closed.set()
    opened.close()
