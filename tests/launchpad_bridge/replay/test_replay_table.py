"""A table whose rows stay after they were drawn."""

import concurrent.futures
import gc
import json
import threading
import time
import weakref

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories.rows import RowMemory
from replicator.launchpad_bridge.trajectories.table import (
    TableTimeoutError,
    TrajectoryError,
)

SOON_S = 60.0


def rows(*ids):
    ids = np.array(ids, np.int64)
    return {"id": ids, "reward": np.repeat(ids[:, None], 3, axis=1).astype(np.float32)}


def insert(table, *ids, version=0, **options):
    table.insert(rows(*ids), actor="actor/0", version=version, **options)


def draw(table, count=1000, **options):
    return table.take(count, **{"timeout_s": SOON_S} | options)


def ids_of(taken):
    ids = taken.trajectories["id"]
    assert (taken.trajectories["reward"] == ids[:, None]).all()
    return ids


def table_of(capacity=1024, **options):
    return lp.ReplayTable(capacity, sampler=lp.prioritised(1), **options)


def test_rows_stay_and_keep_their_keys():
    table = table_of()
    insert(table, 1, 2, 3)
    first, second = draw(table), draw(table)
    assert set(ids_of(first).tolist()) == set(ids_of(second).tolist()) == {1, 2, 3}
    assert first.keys.dtype == np.int64
    assert first.probabilities.dtype == np.float64
    by_id = dict(zip(ids_of(first).tolist(), first.keys.tolist(), strict=True))
    assert [by_id[each] for each in ids_of(second).tolist()] == second.keys.tolist()


def test_a_table_that_nobody_has_is_gone_without_a_collection():
    gc.collect()
    gc.disable()
    try:
        table = table_of()
        insert(table, 1)
        found = weakref.ref(table)
        del table
        assert found() is None
    finally:
        gc.enable()


def test_no_key_is_ever_of_two_rows():
    table, seen = table_of(5), {}
    for number in range(200):
        insert(table, 2 * number, 2 * number + 1)
        taken = draw(table, 5)
        for key, each in zip(taken.keys.tolist(), ids_of(taken).tolist(), strict=True):
            assert seen.setdefault(key, each) == each


def test_keys_of_a_table_that_starts_again_are_of_no_row_before():
    first, second = table_of(4), table_of(4)
    for table in (first, second):
        insert(table, 1, 2, 3, 4)
    second.update_priorities(draw(first, 4).keys, np.full(4, 9.0))
    assert second.statistics()["late"] == 4


def test_priorities_that_were_set_are_those_that_rows_are_drawn_by():
    table = table_of()
    insert(table, 1, 2, priorities=[1, 1])
    taken = draw(table)
    table.update_priorities(taken.keys, np.where(ids_of(taken) == 1, 3.0, 1.0))
    taken = draw(table)
    chances = np.where(ids_of(taken) == 1, 0.75, 0.25)
    np.testing.assert_array_equal(taken.probabilities, chances)


def test_of_one_key_twice_the_last_priority_counts():
    table = table_of()
    insert(table, 1, 2, priorities=[1, 1])
    keys = dict(zip(*map(np.ndarray.tolist, keyed(draw(table))), strict=True))
    table.update_priorities(np.array([keys[1], keys[2], keys[1]]), [5.0, 1.0, 0.0])
    assert set(ids_of(draw(table)).tolist()) == {2}


def keyed(taken):
    return ids_of(taken), taken.keys


def test_an_update_of_a_row_that_was_overwritten_is_counted_and_not_applied():
    table = table_of(2)
    insert(table, 1, 2)
    old = draw(table, 2).keys
    insert(table, 3, 4)
    table.update_priorities(old, np.array([0.0, 0.0]))
    counts = table.statistics()
    assert (counts["late"], counts["updated"]) == (2, 0)
    assert set(ids_of(draw(table, 2)).tolist()) <= {3, 4}


def test_a_row_without_a_priority_gets_the_largest_raw_one_so_far():
    table = lp.ReplayTable(16, sampler=lp.prioritised(0.5))
    insert(table, 1)
    insert(table, 2, priorities=[16])
    taken = draw(table, 16)
    table.update_priorities(taken.keys, np.full(16, 4.0))
    insert(table, 3)  # 16, though none has it any longer
    taken = draw(table, 16)
    chances = dict(zip(ids_of(taken).tolist(), taken.probabilities, strict=True))
    assert chances[3] == pytest.approx(4 / (4 + 2 + 2))


def test_a_skipped_row_takes_its_priority_along():
    table, given = table_of(), rows(1, 2, 3)
    given["reward"][1] = np.nan
    table.insert(given, actor="a", version=0, priorities=[1, 5, 3])
    taken = draw(table)
    chances = np.where(ids_of(taken) == 1, 0.25, 0.75)
    np.testing.assert_array_equal(taken.probabilities, chances)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_priority_that_is_none_is_refused_at_either_door(bad):
    table = table_of()
    insert(table, 1)
    with pytest.raises(TrajectoryError, match="`priorities` of actor/0 must be finite"):
        insert(table, 2, 3, priorities=[1, bad])
    with pytest.raises(ArgumentError, match="`values` must be finite and at least 0"):
        table.update_priorities(draw(table, 2).keys, np.array([1, bad]))
    counts = table.statistics()
    assert (counts["inserted"], counts["updated"]) == (1, 0)
    assert counts["refused"] == {"actor/0": 1}


def test_a_key_that_was_never_given_is_refused():
    table = table_of()
    insert(table, 1)
    newest = draw(table, 1).keys
    for bad in (newest + 1, newest + 1024, -newest):
        with pytest.raises(ArgumentError, match="`keys` must be keys that this table"):
            table.update_priorities(bad, [1.0])


def test_as_many_priorities_as_rows_and_keys_are_required():
    table = table_of()
    with pytest.raises(TrajectoryError, match="one for each row, got 1 for 2"):
        insert(table, 1, 2, priorities=[1.0])
    insert(table, 1)
    with pytest.raises(ArgumentError, match="one for each key, got 2 for 1"):
        table.update_priorities(draw(table, 1).keys, [1.0, 2.0])


def test_a_table_whose_priorities_are_all_0_waits_and_names_it():
    table = table_of()
    insert(table, 1, 2, priorities=[0, 0])
    assert draw(table, 1, timeout_s=0) is None
    assert "a priority above 0: all of 2 rows" in table.statistics()["waits_for"]
    insert(table, 3)
    assert ids_of(draw(table, 2)).tolist() == [3, 3]
    assert table.statistics()["waits_for"] is None


def test_a_table_without_rows_says_so():
    table = table_of()
    assert draw(table, 1, timeout_s=0) is None
    assert table.statistics()["waits_for"] == "rows: the table is empty"


def test_a_batch_beyond_the_draws_that_are_left_names_them():
    table = table_of(max_times_sampled=2)
    insert(table, 1, 2)
    draw(table, 1)
    assert draw(table, 4, timeout_s=0) is None
    found = "draws: `max_times_sampled` leaves 3 for a batch of 4"
    assert table.statistics()["waits_for"] == found


def test_oldest_bounds_what_is_drawn_and_drops_nothing():
    table = table_of()
    for version in range(4):
        insert(table, version, version=version)
    assert set(draw(table, oldest=2).versions.tolist()) == {2, 3}
    assert table.statistics()["too_old"] == 2
    insert(table, 9, version=1)  # of a slow actor
    assert set(draw(table, oldest=3).versions.tolist()) == {3}
    assert draw(table, oldest=4, timeout_s=0) is None
    assert "5 of 5 are too old" in table.statistics()["waits_for"]
    assert set(draw(table, newest=0).versions.tolist()) == {0, 1, 2, 3}
    assert table.statistics()["held"] == 5


def test_oldest_of_another_sample_does_not_bound_one_that_waits():
    table = table_of()
    insert(table, 0, version=0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(draw, table, 8, oldest=5)
        while table.statistics()["too_old"] == 0:
            time.sleep(0.001)
        draw(table, 1)  # of any version
        insert(table, 5, version=5)
        assert set(waiting.result(SOON_S).versions.tolist()) == {5}


def test_a_priority_of_a_row_that_is_too_old_counts_once_it_may_be_drawn():
    table = table_of()
    insert(table, 1, version=1, priorities=[1])
    keys = draw(table, 1).keys
    insert(table, 2, version=2, priorities=[1])
    draw(table, 1, oldest=2)
    table.update_priorities(keys, [3.0])
    taken = draw(table)
    assert set(taken.probabilities[ids_of(taken) == 1]) == {0.75}


@pytest.mark.parametrize("sampler", [lp.uniform(), lp.prioritised(), lp.fifo()])
def test_a_row_that_was_drawn_as_often_as_it_may_be_goes(sampler):
    table = lp.ReplayTable(8, sampler=sampler, max_times_sampled=3)
    insert(table, 1, 2, 3, 4)
    found = [ids_of(draw(table, 4)) for _ in range(3)]
    assert np.bincount(np.concatenate(found)).tolist() == [0, 3, 3, 3, 3]
    assert draw(table, 1, timeout_s=0) is None
    counts = table.statistics()
    assert (counts["held"], counts["dropped"]["used_up"]) == (0, 4)


def test_the_remover_chooses_who_makes_room():
    table = table_of(3, remover="lowest")
    insert(table, 1, 2, 3, priorities=[5, 1, 4])
    insert(table, 4, priorities=[2])
    insert(table, 5, priorities=[3])
    assert set(ids_of(draw(table, 3)).tolist()) <= {1, 3, 5}
    counts = table.statistics()
    assert (counts["held"], counts["dropped"]["full"]) == (3, 2)


def test_no_batch_comes_before_min_size():
    table = table_of(limiter=lp.RateLimiter(min_size=3))
    insert(table, 1, 2)
    assert draw(table, 2, timeout_s=0) is None
    assert "RateLimiter(min_size=3" in table.statistics()["waits_for"]
    insert(table, 3)
    assert len(draw(table, 2).keys) == 2


def test_who_is_ahead_waits_and_the_time_is_counted():
    limiter = lp.RateLimiter(min_size=1, samples_per_insert=2, error=5)
    table = table_of(limiter=limiter)
    insert(table, 1)
    insert(table, 2, 3)
    assert draw(table, 4) is not None
    assert draw(table, 4) is not None
    assert draw(table, 3, timeout_s=0.01) is None
    assert "3 rows inserted, 8 drawn" in table.statistics()["waits_for"]
    insert(table, 4, 5)
    insert(table, 6, 7)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inserting = pool.submit(insert, table, 8)
        while not table.statistics()["blocked"]:
            assert not inserting.done()
            time.sleep(0.001)
        draw(table, 4)
        inserting.result(SOON_S)
    counts = table.statistics()
    assert counts["blocked_s"] > 0
    assert counts["waited_s"] > 0


def test_rows_that_cannot_be_drawn_do_not_make_new_ones_wait():
    limiter = lp.RateLimiter(min_size=1, samples_per_insert=1, error=2)
    table = table_of(limiter=limiter)
    for number in range(10):  # far beyond the limiter's bound
        insert(table, number, priorities=[0])
    insert(table, 10)
    assert draw(table, 1) is not None


def test_sizes_that_the_limiter_can_never_let_pass_are_refused():
    limiter = lp.RateLimiter(min_size=1, samples_per_insert=2, error=4)
    table = table_of(limiter=limiter)
    insert(table, 1, 2)
    least = "at least 5, for samples of 6 .`batch_size` x `samples_per_call`"
    with pytest.raises(ArgumentError, match=f"`error` must be {least}"):
        draw(table, 6)
    with pytest.raises(ArgumentError, match="inserts of 4"):
        insert(table, 1, 2, 3, 4)


def test_a_batch_or_an_insert_beyond_the_capacity_is_refused():
    table = table_of(4)
    least = "at least 5, for samples of 5 .`batch_size` x `samples_per_call`"
    with pytest.raises(ArgumentError, match=f"`capacity` must be {least}"):
        draw(table, 5)
    with pytest.raises(ArgumentError, match="`capacity` must be at least 6"):
        insert(table, *range(6))


OPTIONS = {
    "sampler": [None, "uniform", lp.uniform],
    "remover": ["newest", None],
    "limiter": [None, 3],
    "max_times_sampled": [0, 1.5],
    "seed": [-1, "a"],
    "on_nonfinite": ["drop"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in OPTIONS for value in OPTIONS[name]]
)
def test_an_option_that_breaks_its_rule_is_refused(name, value):
    with pytest.raises(ArgumentError, match=f"`{name}` must be"):
        lp.ReplayTable(4, **{name: value})


def test_numbers_of_numpy_are_as_those_of_python():
    limiter = lp.RateLimiter(
        min_size=np.int64(1), samples_per_insert=np.float32(4), error=np.float32(8)
    )
    table = table_of(np.int64(8), limiter=limiter)
    insert(table, 1, 2)
    draw(table, np.int64(4))
    assert json.loads(json.dumps(table.statistics()))["taken"] == 4
    assert repr(limiter) == repr(
        lp.RateLimiter(min_size=1, samples_per_insert=4.0, error=8.0)
    )


def test_a_capacity_below_min_size_is_refused():
    with pytest.raises(ArgumentError, match="`capacity` must be at least `min_size`"):
        table_of(4, limiter=lp.RateLimiter(min_size=5))


def test_draws_are_those_of_the_seed():
    found = []
    for seed in (0, 0, 1):
        table = table_of(64, seed=seed)
        insert(table, *range(64))
        found.append(ids_of(draw(table, 64)).tolist())
    assert found[0] == found[1] != found[2]


def test_a_row_is_not_overwritten_while_it_is_read(monkeypatch):
    table = table_of(2)
    insert(table, 1, 2)
    reading, goes_on = threading.Event(), threading.Event()
    read = RowMemory.read

    def slow(self, slots):
        reading.set()
        assert goes_on.wait(SOON_S)
        return read(self, slots)

    monkeypatch.setattr(RowMemory, "read", slow)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        taking = pool.submit(draw, table, 2)
        assert reading.wait(SOON_S)
        inserting = [pool.submit(insert, table, 3), pool.submit(insert, table, 4)]
        concurrent.futures.wait(inserting, timeout=0.02)
        goes_on.set()
        assert set(ids_of(taking.result(SOON_S)).tolist()) <= {1, 2}
        for each in inserting:
            each.result(SOON_S)


def test_an_insert_that_cannot_be_copied_leaves_the_table_as_it_was(monkeypatch):
    table = table_of(4)
    insert(table, 1)

    def no_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RowMemory, "write", no_memory)
        with pytest.raises(MemoryError):
            insert(table, 2, 3)
    insert(table, 4, 5, 6)
    assert table.statistics()["held"] == 4


def test_many_threads_insert_draw_and_update_and_rows_stay_whole():
    table, stop = table_of(64, limiter=lp.RateLimiter(min_size=8)), threading.Event()

    def act(first):
        for number in range(150):
            insert(table, *range(first + 3 * number, first + 3 * number + 3))

    def learn():
        while not stop.is_set():
            taken = draw(table, 32)
            ids_of(taken)
            table.update_priorities(taken.keys, 1.0 + taken.keys % 7)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        learning = [pool.submit(learn) for _ in range(2)]
        acting = [pool.submit(act, 10_000 * actor) for actor in range(4)]
        try:
            for each in acting:
                each.result(SOON_S)
        finally:
            stop.set()
        for each in learning:
            each.result(SOON_S)
    counts = table.statistics()
    assert counts["inserted"] == 4 * 150 * 3
    assert counts["held"] == 64
    assert counts["inserted"] == 64 + counts["dropped"]["full"]


def test_an_insert_that_waits_too_long_says_who_is_ahead(monkeypatch):
    monkeypatch.setattr(
        "replicator.launchpad_bridge.trajectories.handler_wait.LONGEST_S", 0.02
    )
    limiter = lp.RateLimiter(min_size=1, samples_per_insert=1, error=1)
    table = table_of(limiter=limiter)
    insert(table, 1)
    insert(table, 2)
    with pytest.raises(TableTimeoutError, match="2 rows inserted, 0 drawn"):
        insert(table, 3)
    assert table.statistics()["inserted"] == 2
