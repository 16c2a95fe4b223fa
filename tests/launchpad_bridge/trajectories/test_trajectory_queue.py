import concurrent.futures
import json
import threading
import tracemalloc

import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories.rows import RowMemory
from replicator.launchpad_bridge.trajectories.table import ActorTurn, TrajectoryError
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from tests.launchpad_bridge.trajectories.tables import SOON_S, ids_of, rows


def insert(queue, *ids, version=0, **options):
    return queue.insert(rows(*ids), actor="actor/0", version=version, **options)


def dropped(queue):
    """Return why trajectories were dropped, where any were."""
    counts = queue.statistics()["dropped"]
    return {reason: count for reason, count in counts.items() if count}


def take_all(queue):
    waiting = queue.statistics()["waiting"]
    return ids_of(queue.take(waiting, timeout_s=0)) if waiting else []


def test_the_oldest_come_out_first():
    queue = TrajectoryQueue(16)
    insert(queue, 1, 2, 3)
    insert(queue, 4)
    assert ids_of(queue.take(3, timeout_s=0)) == [1, 2, 3]
    insert(queue, 5, 6)
    assert ids_of(queue.take(3, timeout_s=0)) == [4, 5, 6]


def test_actors_are_told_to_go_on_as_they_please():
    queue = TrajectoryQueue(16)
    assert insert(queue, 1) == queue.turn("actor/0") == ActorTurn()


def test_a_full_queue_can_drop_the_oldest():
    queue = TrajectoryQueue(4, when_full="drop_oldest")
    for first in (1, 4, 7):
        insert(queue, first, first + 1, first + 2)
    assert dropped(queue) == {"full_oldest": 5}
    assert take_all(queue) == [6, 7, 8, 9]


def test_a_full_queue_can_drop_the_newest():
    queue = TrajectoryQueue(4, when_full="drop_newest")
    for first in (1, 4, 7):
        insert(queue, first, first + 1, first + 2)
    assert dropped(queue) == {"full_newest": 5}
    assert take_all(queue) == [1, 2, 3, 4]


def test_what_is_too_old_is_dropped_where_it_would_be_taken():
    queue = TrajectoryQueue(16)
    for version in (3, 1, 2, 3):
        insert(queue, 10 * version, version=version)
    taken = queue.take(3, oldest=2, timeout_s=0)
    assert ids_of(taken) == [30, 20, 30]
    assert taken.versions.tolist() == [3, 2, 3]
    assert dropped(queue) == {"too_old": 1}


def test_room_of_what_is_too_new_is_free_again():
    queue = TrajectoryQueue(4)
    insert(queue, 1, 2, version=7)
    insert(queue, 3, version=5)
    assert queue.take(2, newest=6, timeout_s=0) is None
    assert dropped(queue) == {"too_new": 2}
    insert(queue, 4, 5, version=6)
    assert ids_of(queue.take(3, newest=6, timeout_s=0)) == [3, 4, 5]


def test_a_take_waits_for_trajectories_that_are_new_enough():
    queue = TrajectoryQueue(8)
    insert(queue, 1, 2, 3, 4)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        taking = pool.submit(queue.take, 4, oldest=1, timeout_s=SOON_S)
        insert(queue, 5, 6, 7, 8, version=1)  # waits until the first four are dropped
        assert ids_of(taking.result()) == [5, 6, 7, 8]


def test_counts_of_a_queue_made_with_numbers_of_numpy_are_json():
    queue = TrajectoryQueue(np.int64(8))
    insert(queue, 1, 2)
    queue.take(np.int64(2), timeout_s=0)
    assert json.loads(json.dumps(queue.statistics()))["taken"] == 2


def test_trajectories_with_nan_are_skipped_and_the_others_kept():
    queue = TrajectoryQueue(16)
    bad = rows(1, 2, 3)
    bad["reward"][1, 0] = np.nan
    queue.insert(bad, actor="actor/0", version=0, episodes=[np.nan, 2.0])
    insert(queue, 4)
    taken = queue.take(3, timeout_s=0)
    assert ids_of(taken) == [1, 3, 4]
    assert taken.episodes == [2.0]
    assert dropped(queue) == {"nonfinite": 1}


def test_an_insert_of_nothing_but_nan_waits_for_no_room():
    queue = TrajectoryQueue(4)
    insert(queue, 1, 2, 3, 4)
    queue.insert(rows(5, reward=np.inf), actor="actor/0", version=0)
    assert queue.statistics()["nonfinite"] == 1


@pytest.mark.parametrize("when_full", ["block", "drop_oldest", "drop_newest"])
def test_counts_add_up_when_threads_race(when_full):
    queue = TrajectoryQueue(12, when_full=when_full)
    taken, is_over = [], threading.Event()

    def act(actor):
        for k in range(60):
            base = 1000 * actor + 3 * k
            insert(queue, base, base + 1, base + 2, version=k)

    def learn():
        while not is_over.is_set() or queue.statistics()["waiting"] >= 5:
            if (found := queue.take(5, oldest=3, timeout_s=0.01)) is not None:
                taken.extend(ids_of(found))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        learning = [pool.submit(learn) for _ in range(2)]
        for acting in [pool.submit(act, actor) for actor in range(4)]:
            acting.result(SOON_S)
        is_over.set()
        for each in learning:
            each.result(SOON_S)
    counts = queue.statistics()
    lost = counts["dropped"]
    assert len(taken) == len(set(taken)) == counts["taken"]
    assert counts["inserted"] + lost["full_newest"] == 4 * 60 * 3
    gone = counts["taken"] + lost["full_oldest"] + lost["too_old"]
    assert counts["inserted"] == gone + counts["waiting"]
    assert len(queue._free) == 12 - counts["waiting"]


def test_an_insert_of_nothing_but_nan_waits_for_nobody_in_line():
    queue = TrajectoryQueue(capacity=1)
    queue.insert(rows(0), actor="a", version=0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        blocked = pool.submit(queue.insert, rows(1), actor="b", version=0)
        while queue.statistics()["blocked"] == 0:
            pass
        queue.insert(rows(2, reward=np.nan), actor="c", version=0)
        queue.take(1, timeout_s=SOON_S)
        blocked.result(SOON_S)


def test_an_insert_that_waits_for_room_holds_no_copy():
    queue, wide = TrajectoryQueue(1), {"reward": np.ones((1, 1 << 20), np.float32)}
    queue.insert(wide, actor="a", version=0)
    tracemalloc.start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        blocked = pool.submit(queue.insert, wide, actor="b", version=0)
        while queue.statistics()["blocked"] == 0:
            pass
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        queue.take(1, timeout_s=SOON_S)
        blocked.result(SOON_S)
    assert held < 1 << 20


def test_who_waits_for_room_is_served_in_order():
    queue = TrajectoryQueue(8)
    for first in (0, 4):
        insert(queue, *range(first, first + 4))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        large = pool.submit(insert, queue, 10, 11, 12, 13)
        while queue.statistics()["blocked"] == 0:
            pass
        small = pool.submit(insert, queue, 20)
        while queue.statistics()["blocked"] < 2:
            pass
        queue.take(1, timeout_s=0)  # room for the small one, which came later
        assert queue.statistics()["blocked"] == 2
        queue.take(4, timeout_s=0)
        large.result(SOON_S)
        small.result(SOON_S)
        taken = [i for _ in range(2) for i in ids_of(queue.take(4, timeout_s=0))]
        assert sorted(taken) == [5, 6, 7, 10, 11, 12, 13, 20]
    assert queue.statistics()["blocked_s"] > 0


def test_an_insert_that_could_wait_for_ever_is_refused_and_not_the_take():
    queue = TrajectoryQueue(8)
    insert(queue, 1, 2, 3)
    assert queue.take(8, timeout_s=0) is None
    with pytest.raises(ArgumentError, match="must be at least 10, for samples of 8 "):
        insert(queue, 4, 5, 6)
    assert queue.statistics()["refused"] == {"actor/0": 1}
    assert ids_of(queue.take(3, timeout_s=0)) == [1, 2, 3]


def test_a_large_insert_before_the_first_take_does_not_end_the_learner():
    queue = TrajectoryQueue(32)
    insert(queue, *range(30))
    assert ids_of(queue.take(8, timeout_s=0)) == [*range(8)]


def test_an_insert_that_waits_is_refused_when_a_batch_turns_out_too_large_for_it():
    queue = TrajectoryQueue(8)
    insert(queue, 1, 2, 3)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(insert, queue, 10, 11, 12, 13, 14, 15)
        while queue.statistics()["blocked"] == 0:
            pass
        assert queue.take(4, timeout_s=0) is None
        with pytest.raises(ArgumentError, match=r"samples of 4 .* inserts of 6"):
            waiting.result(SOON_S)
    insert(queue, 4)
    assert ids_of(queue.take(4, timeout_s=0)) == [1, 2, 3, 4]


def test_a_batch_above_the_capacity_is_refused():
    with pytest.raises(ArgumentError, match="at least 9, for samples of 9 "):
        TrajectoryQueue(8).take(9, timeout_s=0)


def test_more_trajectories_than_there_is_room_for_are_refused():
    queue = TrajectoryQueue(2, when_full="drop_newest")
    with pytest.raises(ArgumentError, match="inserts of 3, got 2"):
        insert(queue, 1, 2, 3)


def test_begin_leaves_what_is_held():
    queue = TrajectoryQueue(4)
    insert(queue, 1)
    queue.begin(None)
    assert take_all(queue) == [1]


BAD = {
    "capacity": {"capacity": 0},
    "when_full": {"capacity": 4, "when_full": "wait"},
    "on_nonfinite": {"capacity": 4, "on_nonfinite": "ignore"},
    "finite": {"capacity": 4, "like": rows(1), "finite": ("loss",)},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(name):
    with pytest.raises(ArgumentError, match=f"`{name}` must"):
        TrajectoryQueue(**BAD[name])


def test_too_many_trajectories_do_not_fix_the_form():
    queue = TrajectoryQueue(2)
    with pytest.raises(ArgumentError, match="inserts of 3"):
        queue.insert({"reward": np.zeros((3, 5))}, actor="actor/1", version=0)
    insert(queue, 1, 2)


def test_a_form_that_came_second_does_not_change_where_nan_is_looked_for():
    queue = TrajectoryQueue(16)
    first = {"reward": np.zeros((1, 2)), "z": np.zeros((1, 2))}
    barrier = threading.Barrier(2)
    other = {"a": np.zeros((1, 2)), "reward": np.zeros((1, 2))}
    plain = queue._checks._first

    def both_first(trajectories, actor):
        found = plain(trajectories, actor)
        barrier.wait(SOON_S)  # nobody has inserted yet
        return found

    queue._checks._first = both_first
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = [
            pool.submit(queue.insert, rows, actor=actor, version=0)
            for actor, rows in (("a", first), ("b", other))
        ]
        errors = [each.exception(SOON_S) for each in both]
    assert sum(isinstance(error, TrajectoryError) for error in errors) == 1
    winner = first if errors[0] is None else other
    bad = {**winner, "reward": np.full((1, 2), np.nan)}
    queue.insert(bad, actor="a", version=0)
    assert queue.statistics()["nonfinite"] == 1


def test_counts_add_up_while_a_batch_is_copied(monkeypatch):
    queue, looks = TrajectoryQueue(8), []
    queue.insert(rows(1, 2, 3, 4), actor="actor/0", version=0)

    def read(memory, slots):
        looks.append(queue.statistics())
        return {}

    monkeypatch.setattr(RowMemory, "read", read)
    queue.take(2, timeout_s=SOON_S)
    (counts,) = looks
    assert counts["inserted"] == counts["taken"] + counts["waiting"] == 4
