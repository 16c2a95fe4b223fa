"""Shards that arrive at an island of several processes, and votes on them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.controller.islands.waiting.arrivals import ArrivedShards, IslandValue
from replicator.controller.islands.waiting.outcome import Outcome
from replicator.errors import IslandLostError

KEY, SENDER, LIMIT_S = (7, 0), 0, 60
NAMES = ("island0", "island0.1")


def shards(*arrays):
    return IslandValue(list(arrays), Outcome().end())


@pytest.fixture
def members():
    return {name: ArrivedShards(name) for name in NAMES}


def taken(members):
    """Take a value of island1 in all processes of an island, at once."""

    def take(name):
        fellows = {other: at for other, at in members.items() if other != name}
        return members[name].take("island1", KEY, [SENDER], fellows)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(take, members, timeout=LIMIT_S))


def test_a_value_of_which_all_have_their_shards_is_taken(members):
    for name, member in members.items():
        member.deliver(KEY, SENDER, shards(name))
    assert [value.array for value in taken(members)] == [[name] for name in NAMES]
    assert not any(member._slots for member in members.values())


@pytest.mark.parametrize("late", NAMES)
def test_a_value_that_a_lost_island_sent_to_some_is_lost_for_all(members, late):
    error = IslandLostError("island1 was lost")
    for name, member in members.items():
        if name != late:
            member.deliver(KEY, SENDER, shards(name))
        member.lose("island1", error)
    values = taken(members)
    assert [value.array for value in values] == [None, None]
    assert [value.done.exception() for value in values] == [error, error]


def test_who_waits_for_a_vote_of_a_lost_process_is_told(members):
    first, error = members["island0"], IslandLostError("island0 was lost")
    first.deliver(KEY, SENDER, shards("x"))
    first.lose("island0.1", error)
    fellows = {"island0.1": members["island0.1"]}
    assert first.take("island1", KEY, [SENDER], fellows).done.exception() is error
