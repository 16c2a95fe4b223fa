"""Priorities go back to their rows: in order, many at once, and nobody waits."""

import threading

import numpy as np
import pytest

from replicator.errors import ConnectionLostError
from replicator.launchpad_bridge.learner.priority_updates import PriorityUpdates

SOON_S = 60.0


class Received:
    """What a table was called with; it may be away, or hold its calls."""

    def __init__(self, *, away=0, refuses=False):
        self.calls = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_called = threading.Event()
        self._away, self._refuses = away, refuses

    def update(self, *, keys, values):
        self.is_called.set()
        assert self.may_go.wait(SOON_S)
        if self._away:
            self._away -= 1
            raise ConnectionLostError("the table is away")
        if self._refuses:
            raise ValueError("refused")
        self.calls.append(dict(zip(keys.tolist(), values.tolist(), strict=True)))

    @property
    def all(self):
        return {key: each for call in self.calls for key, each in call.items()}


def updates_of(received, *, is_stopping=lambda: False):
    return PriorityUpdates(received.update, is_stopping)


def send(updates, *numbers, of=2):
    """Send priorities of batches of `of` rows: of key k it is k / 4."""
    for number in numbers:
        keys = np.arange(number * of, (number + 1) * of)
        updates.note(number, keys)
        updates.send(number + 1, np.float32(keys / 4))


def test_each_key_gets_the_value_of_its_place():
    received = Received()
    with updates_of(received) as updates:
        send(updates, 0, 1, 2)
    assert received.all == {key: key / 4 for key in range(6)}


def test_several_batches_of_one_call_are_told_apart_by_their_number():
    received = Received()
    with updates_of(received) as updates:
        for number in (5, 6, 7):  # 7 is read ahead
            updates.note(number, np.arange(2) + 10 * number)
        updates.send(7, np.float32([[[1], [2]], [[3], [4]]]))
    assert received.all == {50: 1, 51: 2, 60: 3, 61: 4}


def test_what_comes_while_the_table_is_busy_goes_by_one_call_and_nobody_waits():
    received = Received()
    received.may_go.clear()
    with updates_of(received) as updates:
        send(updates, 0)
        assert received.is_called.wait(SOON_S)
        send(updates, *range(1, 50))
        assert not received.calls
        received.may_go.set()
    assert len(received.calls) == 2
    assert received.all == {key: key / 4 for key in range(100)}


def test_a_table_that_comes_back_gets_them_all():
    received = Received(away=3)
    with updates_of(received) as updates:
        send(updates, 0, 1)
    assert received.all == {key: key / 4 for key in range(4)}
    assert updates.counts == {"sent": 4, "nonfinite": 0, "lost": 0}


def test_a_table_that_is_gone_ends_nothing_and_is_counted():
    received = Received(away=1 << 30)
    with updates_of(received, is_stopping=lambda: True) as updates:
        send(updates, 0)
    assert updates.counts == {"sent": 0, "nonfinite": 0, "lost": 2}


def test_a_learner_that_fails_does_not_wait_for_a_table_that_is_gone():
    updates = updates_of(Received(away=1 << 30))

    def fail():
        with updates:
            send(updates, 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert updates.counts["lost"] == 2


def test_what_is_not_finite_is_left_out():
    received = Received()
    with updates_of(received) as updates:
        updates.note(0, np.arange(4))
        updates.send(1, np.float32([1, np.nan, np.inf, 0]))
    assert received.all == {0: 1, 3: 0}
    assert updates.counts["nonfinite"] == 2


@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_the_table_refuses_is_raised_at_the_next_update_or_the_end(at_the_end):
    def learn():
        with updates_of(Received(refuses=True)) as updates:
            send(updates, 0)
            if not at_the_end:
                updates._thread.join(SOON_S)
                send(updates, 1)
                raise KeyError  # never reached

    with pytest.raises(ValueError, match="refused"):
        learn()
