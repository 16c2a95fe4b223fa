import contextlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator import rpc
from replicator.errors import (
    ArgumentError,
    ConnectionLostError,
    InputTimeoutError,
    RpcError,
)
from replicator.launchpad_bridge.trajectories.batches import Batches
from replicator.launchpad_bridge.trajectories.policy_lag import PolicyLag
from replicator.launchpad_bridge.trajectories.table import Cut
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns
from tests.launchpad_bridge.trajectories.tables import (
    ACTORS,
    SOON_S,
    ids_at,
    rows,
)


def wait_until(is_so):
    """Ask, for a while, until something is so."""
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def queue_of(*versions, capacity=64):
    """Return a queue of one trajectory for each version, which is also its id."""
    queue = TrajectoryQueue(capacity)
    for version in versions:
        queue.insert(rows(version), actor="actor/0", version=version)
    return queue


def ids(ready):
    return ready.batch["observation"]["id"].tolist()


def next_ids(batches, count):
    """Return the ids of the next batches."""
    return [ids(batches.next()) for _ in range(count)]


def test_batches_come_in_order_with_their_lag():
    with Batches(queue_of(4, 5, 5, 6), batch_size=2, update=6) as batches:
        first, second = batches.next(), batches.next()
    assert (ids(first), ids(second)) == ([4, 5], [5, 6])
    assert first.lag == PolicyLag(counts={1: 1, 2: 1}, mean=1.5, largest=2)
    assert second.lag == PolicyLag(counts={1: 1, 2: 1}, mean=1.5, largest=2)


def test_what_is_too_old_is_dropped_by_the_update_that_would_learn_from_it():
    queue = queue_of(3, 4, 5, 4, 5, 6)
    with Batches(queue, batch_size=2, update=5, max_policy_lag=1) as batches:
        assert next_ids(batches, 2) == [[4, 5], [5, 6]]
    assert queue.statistics()["dropped"]["too_old"] == 2


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_more_batches_are_taken_than_said(ahead):
    queue = queue_of(*range(10))
    with Batches(queue, batch_size=2, ahead=ahead) as batches:
        for given in range(2):
            wait_until(lambda: batches.statistics()["ready"] == ahead)
            assert queue.statistics()["taken"] == 2 * (given + ahead)
            batches.next()


def test_put_runs_in_the_background_on_whole_batches():
    def put(batch):
        return threading.current_thread().name, batch["reward"].shape

    with Batches(queue_of(1, 2, 3), batch_size=3, put=put) as batches:
        assert batches.next().batch == ("replicator-batches", (3, 3))


def test_put_casts_as_the_learner_would():
    def put(batch):
        return jnp.asarray(batch["observation"]["id"])

    with jax.enable_x64(True), Batches(queue_of(1), batch_size=1, put=put) as batches:
        assert batches.next().batch.dtype == np.int64


def test_what_put_raises_is_raised_by_next_after_the_batches_before_it():
    def put(batch):
        if batch["observation"]["id"][0] == 2:
            raise ValueError("no memory for two")
        return batch

    with Batches(queue_of(1, 2, 3), batch_size=1, put=put, ahead=2) as batches:
        assert ids(batches.next()) == [1]
        for _ in range(2):
            with pytest.raises(ValueError, match="no memory for two"):
                batches.next()


def test_what_the_table_raises_is_raised_by_next():
    with (
        Batches(TrajectoryQueue(4), batch_size=5) as batches,
        pytest.raises(ArgumentError, match="`capacity` must be at least 5"),
    ):
        batches.next()


def test_episodes_come_with_their_batch():
    queue = TrajectoryQueue(4)
    queue.insert(rows(1), actor="actor/0", version=0, episodes=[1.5])
    with Batches(queue, batch_size=1) as batches:
        assert batches.next().episodes == [1.5]


def test_a_stop_ends_the_wait():
    stop = threading.Event()
    with Batches(TrajectoryQueue(4), batch_size=1) as batches:
        threading.Timer(0.05, stop.set).start()
        assert batches.next(stop) is None


def test_close_ends_the_thread_and_who_waits():
    batches = Batches(TrajectoryQueue(4), batch_size=1)
    threading.Timer(0.05, batches.close).start()
    assert batches.next() is None
    batches.close()
    assert not batches._thread.is_alive()


def test_close_ends_the_thread_while_the_table_is_gone():
    with rpc.Client("unix:/nowhere/table", timeout_s=SOON_S) as client:
        batches = Batches(client, batch_size=1)
        batches.close()
        assert not batches._thread.is_alive()


def test_too_few_trajectories_are_an_error_that_says_how_many_there_are():
    with (
        Batches(queue_of(7, 8), batch_size=3, update=9, timeout_s=0.1) as batches,
        pytest.raises(InputTimeoutError) as caught,
    ):
        batches.next()
    assert str(caught.value) == (
        "The batch of update 9 must be there within 0.1 s: 2 of 3 trajectories are "
        "there. Look at the actors and the table, or raise `timeout_s`."
    )


def test_a_turn_that_does_not_come_is_named():
    table = TrajectoryTurns(["a", "b"], batch_size=2, rows_per_turn=1, lag=0)
    with Batches(table, batch_size=2, timeout_s=0.1) as batches:
        table.insert(rows(1), actor="a", version=0, number=0)
        with pytest.raises(InputTimeoutError, match="there, and turn 0 of b is next"):
            batches.next()


def test_a_table_that_does_not_answer_is_an_error_in_the_end():
    with (
        rpc.Client("unix:/nowhere/table") as client,
        Batches(client, batch_size=1, timeout_s=0.3) as batches,
        pytest.raises(
            InputTimeoutError, match=r"the table does not answer .*no server"
        ),
    ):
        batches.next()


BAD = {
    "batch_size": {"batch_size": 0},
    "ahead": {"batch_size": 1, "ahead": 0},
    "update": {"batch_size": 1, "update": None},
    "max_policy_lag": {"batch_size": 1, "max_policy_lag": -1},
    "put": {"batch_size": 1, "put": 3},
    "cut": {"batch_size": 1, "update": 2, "cut": Cut(batch=3, snapshots={})},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(name):
    with pytest.raises(ArgumentError, match=f"`{name}` must"):
        Batches(TrajectoryQueue(4), **BAD[name])


def test_a_learner_that_forgot_its_cut_is_told():
    with acting(make_turns()) as (table, _):
        batches = Batches(table, batch_size=6, update=2)
        with batches, pytest.raises(ArgumentError, match=r"at batch 0\. Pass that"):
            batches.next()


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
    with (
        acting(make_turns()) as (table, restart),
        Batches(table, batch_size=6, ahead=2) as batches,
    ):
        found = next_ids(batches, 5)
        restart()
        found += next_ids(batches, 10)
        restart()
        found += next_ids(batches, 5)
        counts = batches.statistics()
    assert found == [expected(batch) for batch in range(20)]
    assert counts["restarts"] + counts["lost_calls"] >= 2


def test_a_learner_goes_on_at_the_cut_of_its_checkpoint():
    with acting(make_turns()) as (table, _):
        with Batches(table, batch_size=6, ahead=2) as batches:
            ready = [batches.next() for _ in range(4)]
        cut = ready[1].cut
        assert cut.snapshots == dict.fromkeys(ACTORS, b"1")
        with Batches(table, batch_size=6, update=2, cut=cut) as batches:
            assert next_ids(batches, 3) == [expected(batch) for batch in (2, 3, 4)]


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
    with Batches(Lossy(table), batch_size=6) as batches:
        found = next_ids(batches, 4)
        assert batches.statistics()["lost_calls"] >= 2
    is_over.set()
    table.begin(None)  # wakes those that wait for room
    for thread in threads:
        thread.join(SOON_S)
    assert found == [expected(batch) for batch in range(4)]
