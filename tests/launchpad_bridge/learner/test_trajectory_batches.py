"""Batches of a learner: of the right age, in order, whatever happens to the table."""

import contextlib
import threading

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator import rpc
from replicator.errors import ArgumentError, ConnectionLostError, RpcError
from replicator.launchpad_bridge.learner.trajectory_batches import TrajectoryBatches
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns
from tests.launchpad_bridge.trajectories.tables import ACTORS, SOON_S, ids_at, rows


def batches_of(table, batch_size, *, is_stopping=lambda: False, **options):
    options = {"reached": lambda version, timeout_s: True, **options}
    return TrajectoryBatches(table, batch_size, is_stopping=is_stopping, **options)


def ids(batch):
    return batch["trajectories"]["observation"]["id"].tolist()


def next_ids(batches, count):
    return [ids(next(batches)) for _ in range(count)]


def queue_of(*versions):
    queue = TrajectoryQueue(capacity=16)
    for version in versions:
        queue.insert(rows(version), actor="actor/0", version=version)
    return queue


def test_what_is_too_old_is_dropped_by_the_update_that_would_learn_from_it():
    queue = queue_of(3, 4, 5, 4, 5, 5)
    batches = batches_of(queue, 2, max_policy_lag=1)
    batches.set_state({"batch": 5, "cut": None})
    assert next_ids(batches, 2) == [[4, 5], [5, 5]]
    assert queue.statistics()["dropped"]["too_old"] == 2


def test_versions_that_a_learner_lost_are_dropped_until_it_has_reached_them_again():
    queue = queue_of(9, 4, 7, 6, 5, 5)
    batches = batches_of(queue, 1)
    batches.set_state({"batch": 5, "cut": None})
    assert next_ids(batches, 1) == [[4]]
    assert queue.statistics()["dropped"]["too_new"] == 3
    queue.insert(rows(6), actor="actor/0", version=6)
    assert next_ids(batches, 3) == [[5], [5], [6]]
    assert queue.statistics()["dropped"]["too_new"] == 3


def test_nothing_is_taken_before_it_could_be_new_enough():
    asked, queue = [], queue_of(0, 1)
    batches = batches_of(
        queue,
        1,
        max_policy_lag=1,
        reached=lambda version, timeout_s: asked.append(version) or len(asked) > 3,
    )
    batches.set_state({"batch": 2, "cut": None})
    assert next_ids(batches, 1) == [[1]]
    assert asked == [1, 1, 1, 1]


class Counted(TrajectoryQueue):
    """A queue that notes the calls for its batches."""

    def __init__(self):
        super().__init__(capacity=16)
        self.calls = []

    def take(self, count, **options):
        self.calls.append((count, options["oldest"]))
        return super().take(count, **options)


def test_batches_of_one_call_are_given_out_one_by_one_each_with_its_position():
    queue = Counted()
    queue.insert(rows(0, 1, 2, 3), actor="actor/0", version=0, episodes=[7.0])
    batches = batches_of(queue, 1, samples_per_call=4, max_policy_lag=3)
    found = []
    for _ in range(4):
        found += ids(next(batches))
        state = batches.get_state()
        assert state["batch"] == len(found)
        assert state["played"]["episodes"] == 1
    assert found == [0, 1, 2, 3]
    assert queue.calls == [(4, 0)]


def test_a_stop_leaves_no_call_of_the_step_with_a_part_of_its_batches():
    stop = threading.Event()
    calls = {"samples_per_call": 4, "steps_per_call": 2}
    queue = queue_of(0, 0, 0, 0)
    batches = batches_of(queue, 1, is_stopping=stop.is_set, **calls)
    next(batches)
    stop.set()
    assert len(list(batches)) == 1


def test_no_batch_of_a_call_is_older_than_the_last_update_of_them_allows():
    queue = queue_of(3, 4, 4, 3, 4, 4)
    batches = batches_of(queue, 2, samples_per_call=2, max_policy_lag=1)
    batches.set_state({"batch": 4, "cut": None})
    assert next_ids(batches, 2) == [[4, 4], [4, 4]]
    assert queue.statistics()["dropped"]["too_old"] == 2


def test_a_batch_says_by_which_versions_it_was_acted():
    batches = batches_of(queue_of(3, 4), 2)
    batches.set_state({"batch": 4, "cut": None})
    assert next(batches)["version"].tolist() == [3, 4]


def test_a_stop_ends_the_wait():
    stop = threading.Event()
    batches = batches_of(TrajectoryQueue(4), 1, is_stopping=stop.is_set)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(StopIteration):
        next(batches)


def make_turns():
    return TrajectoryTurns(ACTORS, batch_size=6, rows_per_turn=2, lag=40)


def act(table, actor, is_over):
    """Do the turns that the table asks for, until it is over."""
    turn = table.turn(actor)
    while not is_over.is_set():
        turn = table.insert(
            rows(*ids_at(actor, turn.number)),
            actor=actor,
            version=turn.version,
            number=turn.number,
            snapshot=b"%d" % turn.number,
        )


def act_again(client, actor, is_over):
    """Do them through everything that happens to the table."""
    while not is_over.is_set():
        with contextlib.suppress(RpcError):
            act(client, actor, is_over)


@contextlib.contextmanager
def acting(table):
    """Let actors act on a table that can be replaced behind its address."""
    is_over = threading.Event()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(rpc.Server(table, address="unix:", pool_size=64))
        servers = [server]
        clients = [
            stack.enter_context(rpc.Client(server.address, timeout_s=2))
            for _ in range(len(ACTORS) + 1)
        ]
        threads = [
            threading.Thread(target=act_again, args=(client, actor, is_over))
            for client, actor in zip(clients, ACTORS, strict=False)
        ]
        for thread in threads:
            thread.start()
        try:
            yield clients[-1], lambda: replace(servers, stack)
        finally:
            is_over.set()
            for client in clients:
                client.close()
            for thread in threads:
                thread.join(SOON_S)


def replace(servers, stack):
    """Stop a table's server, and start one of an empty table at its address."""
    address = servers[-1].address
    servers[-1].stop(0)
    server = rpc.Server(make_turns(), address=address, pool_size=64)
    servers.append(stack.enter_context(server))


def expected(batch):
    return [each for actor in ACTORS for each in ids_at(actor, batch)]


def test_batches_go_on_where_they_were_when_the_table_starts_again():
    with acting(make_turns()) as (table, restart):
        batches = batches_of(table, 6)
        found = next_ids(batches, 5)
        restart()
        found += next_ids(batches, 10)
        restart()
        found += next_ids(batches, 5)
    assert found == [expected(batch) for batch in range(20)]


def test_a_learner_goes_on_at_the_state_of_its_checkpoint():
    with acting(make_turns()) as (table, _):
        batches = batches_of(table, 6)
        next_ids(batches, 2)
        state = batches.get_state()
        next_ids(batches, 2)
        again = batches_of(table, 6)
        again.set_state(state)
        assert next_ids(again, 3) == [expected(batch) for batch in (2, 3, 4)]


def test_a_table_that_two_learners_take_from_is_refused():
    with acting(make_turns()) as (table, _):
        one = batches_of(table, 6)
        next_ids(one, 1)
        options = {"timeout_s": SOON_S}
        assert table.call("take", (6,), options, timeout_s=2 * SOON_S) is not None
        with pytest.raises(ArgumentError, match="at batch 1, got batch 2"):
            next(one)


class Lossy:
    """A table some of whose batches never arrive."""

    def __init__(self, table):
        self._table = table
        self._calls = 0

    def __getattr__(self, name):
        return getattr(self._table, name)

    def take(self, count, **options):
        taken = self._table.take(count, **options)
        self._calls += 1
        if self._calls % 3 == 1:
            raise ConnectionLostError("the reply was lost")
        return taken


def test_a_batch_that_was_given_out_and_never_arrived_is_made_again():
    table, is_over = make_turns(), threading.Event()
    table.begin(None)
    threads = [
        threading.Thread(target=act, args=(table, actor, is_over)) for actor in ACTORS
    ]
    for thread in threads:
        thread.start()
    found = next_ids(batches_of(Lossy(table), 6), 4)
    is_over.set()
    table.begin(None)  # wakes those that wait for room
    for thread in threads:
        thread.join(SOON_S)
    assert found == [expected(batch) for batch in range(4)]


@pytest.mark.parametrize(
    ("sampler", "own", "found"),
    [
        (lp.prioritised(), 3, "4, got 3"),
        (lp.prioritised(), None, "4, got None"),
        (lp.uniform(), 4, "None, got 4"),
    ],
)
def test_another_priority_lag_than_the_tables_is_refused(tmp_path, sampler, own, found):
    sizes = dict.fromkeys(("batch_size", "new_rows_per_batch", "rows_per_turn"), 1)
    table = lp.ReplayTurns(
        ["a"], **sizes, lag=0, capacity=1, sampler=sampler, checkpoint_dir=tmp_path
    )
    rows = {"reward": np.ones((1, 1), np.float32)}
    batches = TrajectoryBatches(
        table,
        1,
        is_stopping=lambda: False,
        reached=lambda version, timeout_s: True,
        begun=lambda: table.insert(rows, actor="a", version=0, number=0),
        priority_lag=own,
    )
    message = f"`priority_lag` of the learner must be that of the table, {found}"
    with pytest.raises(ArgumentError, match=message):
        next(batches)
    table._close()
