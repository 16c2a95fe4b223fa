import math

import pytest

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories.turn_order import TurnOrder

GOOD = {"actors": ["a", "b", "c"], "batch_size": 8, "rows_per_turn": 2, "lag": 2}


@pytest.mark.parametrize("turn", range(30))
def test_a_turn_is_where_the_formula_puts_it(turn):
    order = TurnOrder(**GOOD)
    actor, number, batch = order.actor_of(turn), turn // 3, turn * 2 // 8
    assert actor == "abc"[turn % 3]
    assert order.turn_of(actor, number) == turn
    assert turn in order.turns_of_batch(batch)
    assert order.version_of(actor, number) == max(0, batch - 2)


@pytest.mark.parametrize("batch", range(7))
def test_the_number_at_a_batch_counts_the_turns_before_it(batch):
    order = TurnOrder(**GOOD)
    before = range(order.turns_of_batch(batch).start)
    for place, actor in enumerate("abc"):
        counted = sum(turn % 3 == place for turn in before)
        assert order.number_at_batch(actor, batch) == counted


BAD = {
    "actors": [],
    "batch_size": 7,
    "rows_per_turn": 0,
    "lag": -1,
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(name):
    with pytest.raises(ArgumentError, match=f"`{name}` must"):
        TurnOrder(**GOOD | {name: BAD[name]})


def test_a_batch_that_turns_do_not_fill_names_one_that_they_do():
    with pytest.raises(ArgumentError, match=r"got 7 and 2\. Use 8\."):
        TurnOrder(**GOOD | {"batch_size": 7})


def test_a_name_given_twice_is_refused():
    with pytest.raises(ArgumentError, match="`actors` must differ"):
        TurnOrder(**GOOD | {"actors": ["a", "a"]})


def test_a_word_is_no_list_of_actors():
    with pytest.raises(ArgumentError, match="must be a list of names, got 'ab'"):
        TurnOrder(**GOOD | {"actors": "ab"})


def test_each_actor_has_its_share_of_a_batch():
    order = TurnOrder(**GOOD)
    assert math.isclose(order.turns_per_batch * order.rows_per_turn, order.batch_size)
