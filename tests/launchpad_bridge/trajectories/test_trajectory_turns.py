import concurrent.futures
import itertools
import json

import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories.table import (
    ActorTurn,
    Cut,
    TableRestartedError,
    TrajectoryError,
)
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns
from tests.launchpad_bridge.trajectories.tables import (
    ACTORS,
    SOON_S,
    TurnsDriver,
    ids_at,
    ids_of,
    rows,
)


def insert(table, actor, number, **changes):
    """Insert a turn of an actor, whose snapshot is its number."""
    arguments = {
        "trajectories": rows(*ids_at(actor, number)),
        "actor": actor,
        "version": table._order.version_of(actor, number),
        "number": number,
        "snapshot": f"after {number}".encode(),
    }
    return table.insert(**arguments | changes)


def take(table):
    return table.take(6, timeout_s=SOON_S)


@pytest.fixture
def table():
    return TurnsDriver().table


@pytest.mark.parametrize("actors", [*itertools.permutations(ACTORS)])
def test_batches_are_in_the_order_of_turns_whoever_comes_first(table, actors):
    for number in range(2):
        for actor in actors:
            insert(table, actor, number)
    assert ids_of(take(table)) == [0, 1, 1000, 1001, 2000, 2001]
    assert ids_of(take(table)) == [2, 3, 1002, 1003, 2002, 2003]


def test_an_actor_is_told_the_number_and_the_version_of_its_next_turn(table):
    assert table.turn("actor/1") == ActorTurn(number=0, version=0, rows_per_turn=2)
    told = [insert(table, "actor/1", number) for number in range(3)]
    assert told == [
        ActorTurn(number=n + 1, version=n, rows_per_turn=2) for n in range(3)
    ]


def test_a_batch_says_where_all_actors_stand_behind_it(table):
    for number in range(2):
        for actor in ACTORS:
            insert(table, actor, number)
    cut = take(table).cut
    order = {"actors": ACTORS, "batch_size": 6, "rows_per_turn": 2, "lag": 1}
    snapshots = dict.fromkeys(ACTORS, b"after 0")
    assert cut == Cut(batch=1, snapshots=snapshots, order=order)
    assert take(table).cut.snapshots == dict.fromkeys(ACTORS, b"after 1")
    assert Cut.from_json(json.loads(json.dumps(cut.to_json()))) == cut


def test_a_cut_keeps_an_empty_snapshot_apart_from_none():
    cut = Cut(batch=1, snapshots={"a": b"", "b": None})
    assert Cut.from_json(json.loads(json.dumps(cut.to_json()))) == cut


ORDER = {"actors": ACTORS, "batch_size": 6, "rows_per_turn": 2, "lag": 1}


@pytest.mark.parametrize(
    "other",
    [{"actors": ACTORS[::-1]}, {"batch_size": 4}, {"rows_per_turn": 3}, {"lag": 0}],
)
def test_a_cut_of_another_order_is_refused_by_both(table, other):
    for actor in ACTORS:
        insert(table, actor, 0)
    cut = Cut.from_json(json.loads(json.dumps(take(table).cut.to_json())))
    TrajectoryTurns(**ORDER).begin(cut)
    with pytest.raises(ArgumentError, match="`cut` must be of this table's") as caught:
        TrajectoryTurns(**ORDER | other).begin(cut)
    (name, value), said = next(iter(other.items())), str(caught.value)
    assert f"{name!r}: {value!r}" in said
    assert f"{name!r}: {ORDER[name]!r}" in said


def test_a_turn_that_was_there_is_ignored_and_answered_with_where_to_go(table):
    insert(table, "actor/0", 0)
    told = insert(table, "actor/0", 0, trajectories=rows(77, 78))
    assert told == ActorTurn(number=1, version=0, snapshot=b"after 0", rows_per_turn=2)
    insert(table, "actor/1", 0)
    insert(table, "actor/2", 0)
    assert ids_of(take(table)) == [0, 1, 1000, 1001, 2000, 2001]
    assert insert(table, "actor/0", 0) == told  # also when it was taken
    assert table.statistics()["ignored"] == 2


def test_a_turn_that_is_ahead_is_answered_with_where_to_go(table):
    insert(table, "actor/0", 0)
    told = insert(table, "actor/0", 2)
    assert told == ActorTurn(number=1, version=0, snapshot=b"after 0", rows_per_turn=2)
    assert table.statistics()["ahead"] == 1


def test_after_begin_actors_are_told_to_go_back_to_the_cut(table):
    for number in range(3):
        for actor in ACTORS:
            insert(table, actor, number)
    cut = take(table).cut
    take(table)
    table.begin(cut)
    assert table.turn("actor/2") == ActorTurn(
        number=1, version=0, snapshot=b"after 0", rows_per_turn=2
    )
    told = insert(table, "actor/0", 3)
    assert told == ActorTurn(number=1, version=0, snapshot=b"after 0", rows_per_turn=2)
    for actor in ACTORS:
        insert(table, actor, 1)
    assert ids_of(take(table)) == [2, 3, 1002, 1003, 2002, 2003]
    assert table.statistics()["dropped"] == {"begun": 6}


def test_after_begin_without_a_cut_all_begins_anew(table):
    for actor in ACTORS:
        insert(table, actor, 0)
    take(table)
    table.begin(None)
    assert table.turn("actor/0") == ActorTurn(
        number=0, version=0, snapshot=None, rows_per_turn=2
    )


def test_a_table_that_was_not_told_where_the_learner_is_says_so():
    table = TrajectoryTurns(ACTORS, batch_size=6, rows_per_turn=2, lag=1)
    with pytest.raises(
        TableRestartedError, match="`begin` must be called before `take`"
    ):
        table.take(6, timeout_s=0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(table.turn, "actor/0")
        inserting = pool.submit(insert, table, "actor/1", 0)
        with pytest.raises(concurrent.futures.TimeoutError):
            asking.result(0.02)
        table.begin(None)
        assert asking.result(SOON_S) == ActorTurn(number=0, version=0, rows_per_turn=2)
        assert inserting.result(SOON_S) == ActorTurn(
            number=1, version=0, rows_per_turn=2
        )


def test_a_take_ends_when_another_learner_begins(table):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        taking = pool.submit(take, table)
        with pytest.raises(concurrent.futures.TimeoutError):
            taking.result(0.02)
        table.begin(None)
        with pytest.raises(TableRestartedError, match="another learner"):
            taking.result(SOON_S)


def test_a_blocked_insert_is_sent_back_by_begin(table):
    for number in range(3):
        insert(table, "actor/0", number)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inserting = pool.submit(insert, table, "actor/0", 3)
        with pytest.raises(concurrent.futures.TimeoutError):
            inserting.result(0.02)
        table.begin(None)
        assert inserting.result(SOON_S) == ActorTurn(
            number=0, version=0, rows_per_turn=2
        )


def test_at_most_the_batches_of_the_lag_and_two_more_are_held(table):
    for number in range(3):
        for actor in ACTORS:
            insert(table, actor, number)
    counts = table.statistics()
    assert counts["waiting"] == counts["capacity"] == (1 + 2) * 6


def test_who_is_waited_for_is_named(table):
    insert(table, "actor/0", 0)
    insert(table, "actor/2", 0)
    assert table.statistics()["waiting_for"] == "turn 0 of actor/1"


REFUSED = {
    "version": ({"version": 9}, "Turn 0 of actor/0 .* with version 0 of the .* got 9"),
    "rows": ({"trajectories": rows(1)}, "got 2, and 1 trajectories of actor/0. Use 1"),
    "form": ({"trajectories": {"reward": np.zeros((1, 9))}}, "got 2, and 1 traject"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_turn_that_is_not_what_was_asked_for_is_refused(table, name):
    change, text = REFUSED[name]
    with pytest.raises(TrajectoryError, match=text):
        insert(table, "actor/0", 0, **change)
    assert table.statistics()["refused"] == {"actor/0": 1}
    insert(table, "actor/0", 0)


def test_a_snapshot_that_is_no_bytes_is_refused(table):
    with pytest.raises(TrajectoryError, match="`snapshot` of actor/0 must be bytes"):
        insert(table, "actor/0", 0, snapshot="after 0")


def test_snapshots_have_a_share_of_what_all_may_have():
    driver = TurnsDriver(snapshot_bytes=2100)  # of nine turns, and of three actors
    with pytest.raises(TrajectoryError, match=r"of actor/0 must have at most 175 byt"):
        driver.insert("actor/0", snapshot=bytes(176))
    driver.insert("actor/0", snapshot=bytes(175))
    of_all = {"actor/0": bytes(176), "actor/1": None, "actor/2": None}
    with pytest.raises(TrajectoryError, match=r"of actor/0 must have at most 175 byt"):
        driver.table.begin(Cut(batch=0, snapshots=of_all))


HOSTILE_CUTS = [
    range(20_000_000),
    {"batch": 0},
    Cut(batch=0, snapshots=range(20_000_000)),
    Cut(batch=0, snapshots={}, order=range(20_000_000)),
    Cut(batch=0, snapshots={f"{number}": None for number in range(20_000)}),
    Cut(batch=0, snapshots={}, order={"actors": ["a"] * 20_000}),
    Cut(batch=1j, snapshots={}),
    Cut(batch=0, snapshots={"actor/0": [1], "actor/1": None, "actor/2": None}),
    Cut(batch=0, snapshots={1: None}),
]


@pytest.mark.parametrize("cut", HOSTILE_CUTS, ids=lambda cut: repr(cut)[:40])
def test_what_is_no_cut_is_refused_and_leaves_all_as_it_was(table, cut):
    insert(table, "actor/0", 0)
    with pytest.raises(ArgumentError, match="`cut` must be None, or a cut"):
        table.begin(cut)
    assert table.statistics()["waiting"] == 2


WRONG = {
    "actor": lambda table: table.turn("actor/9"),
    "number": lambda table: table.insert(rows(1, 2), actor="actor/0", version=0),
    "count": lambda table: table.take(5, timeout_s=0),
    "oldest": lambda table: table.take(6, oldest=1, timeout_s=0),
    "cut": lambda table: table.begin(Cut(batch=0, snapshots={"actor/0": None})),
    "on_nonfinite": lambda table: TurnsDriver(on_nonfinite="skip"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_are_refused_by_name(table, name):
    with pytest.raises(ArgumentError, match=f"`{name}` must be"):
        WRONG[name](table)


def test_actors_that_share_batches_unevenly_stand_at_their_own_numbers():
    table = TrajectoryTurns(["a", "b"], batch_size=3, rows_per_turn=1, lag=0)
    table.begin(Cut(batch=1, snapshots={"a": b"a1", "b": b"b0"}))
    assert table.turn("a") == ActorTurn(
        number=2, version=1, snapshot=b"a1", rows_per_turn=1
    )
    assert table.turn("b") == ActorTurn(
        number=1, version=1, snapshot=b"b0", rows_per_turn=1
    )


def test_a_cut_of_a_table_made_with_numbers_of_numpy_is_json():
    one = np.int64(1)
    table = TrajectoryTurns(["a"], batch_size=one, rows_per_turn=one, lag=np.int64(0))
    table.begin(None)
    table.insert({"reward": np.zeros((1, 1))}, actor="a", version=0, number=0)
    order = table.take(one, timeout_s=SOON_S).cut.to_json()["order"]
    assert json.loads(json.dumps(order)) == order


def test_taken_trajectories_have_the_version_of_their_batch():
    table = TrajectoryTurns(["a"], batch_size=1, rows_per_turn=1, lag=2)
    table.begin(None)
    found = []
    for number in range(5):
        turn = table.turn("a")
        table.insert(
            {"reward": np.zeros((1, 1))}, actor="a", version=turn.version, number=number
        )
        found += table.take(1, timeout_s=SOON_S).versions.tolist()
    assert found == [0, 0, 0, 1, 2]


def test_another_number_of_environments_is_named_with_the_table_s():
    driver = TurnsDriver()
    message = "`rows_per_turn` .* got 2, and 3 trajectories of actor/0. Use 3"
    with pytest.raises(TrajectoryError, match=message):
        driver.insert(trajectories=rows(0, 1, 2))


def test_a_name_without_its_number_is_told_how_workers_are_called():
    with pytest.raises(ArgumentError, match="has the group's name, without a number"):
        TurnsDriver().table.turn("actor")
