"""Batched handlers behind a server: calls of clients are merged, and give up."""

import time

import pytest

from replicator.rpc.batching import batching as batched_handler_module
from replicator.rpc.batching.batching import batched_handler
from replicator.rpc.client.client import Client, statistics
from replicator.rpc.server.served_call import current_call
from replicator.rpc.server.server import Server

WAIT_S = 60.0
LONG_S = 1000.0


def wait_until(condition):
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.001)  # for what the server does after its reply


class Inference:
    """Remembers the sizes of its batches."""

    def __init__(self):
        self.sizes = []

    @batched_handler(batch_size=3, timeout_s=LONG_S)
    def predict(self, x):
        self.sizes.append(len(x))
        if 13 in x:
            raise ValueError("no 13")
        return 2 * x

    @batched_handler(batch_size=3, timeout_s=0.01)
    def hurry(self, x):
        return [current_call() is None] * len(x), x

    @batched_handler(batch_size=1)
    def forget(self, x):
        return "one"


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(batched_handler_module, "_LOOK_S", 0.01)
    inference = Inference()
    with (
        Server(inference, address="unix:", pool_size=8) as server,
        Client(server.address, timeout_s=WAIT_S) as client,
    ):
        yield inference, client


def test_calls_of_clients_are_one_call(served):
    inference, client = served
    futures = [client.futures.predict(n) for n in (1, 2, 3)]
    assert [future.result(WAIT_S) for future in futures] == [2, 4, 6]
    assert inference.sizes == [3]


def test_one_bad_call_of_a_client_fails_alone(served):
    _, client = served
    futures = [client.futures.predict(n) for n in (1, 13, 3)]
    assert [futures[0].result(WAIT_S), futures[2].result(WAIT_S)] == [2, 6]
    with pytest.raises(ValueError, match="no 13"):
        futures[1].result(WAIT_S)


def test_what_cannot_be_split_is_told_to_the_client(served):
    _, client = served
    with pytest.raises(ValueError, match="`forget` must return one row for each of"):
        client.forget(1)


def test_a_batch_has_no_single_call(served):
    _, client = served
    assert client.hurry(1) == (True, 1)


def test_call_whose_deadline_passes_leaves_its_batch(served):
    inference, client = served
    with pytest.raises(TimeoutError):
        client.call("predict", [1], timeout_s=0.05)
    wait_until(lambda: statistics(client).running == 0)
    futures = [client.futures.predict(n) for n in (1, 2, 3)]
    assert [future.result(WAIT_S) for future in futures] == [2, 4, 6]
    assert inference.sizes == [3]


def test_cancelled_call_leaves_its_batch(served):
    inference, client = served
    future = client.futures.predict(1)
    wait_until(lambda: statistics(client).running == 1)
    future.cancel()
    wait_until(lambda: statistics(client).running == 0)
    futures = [client.futures.predict(n) for n in (1, 2, 3)]
    assert [future.result(WAIT_S) for future in futures] == [2, 4, 6]
    assert inference.sizes == [3]


def test_pool_that_no_batch_can_fill_is_told_and_works(caplog):
    with (
        Server(Inference(), address="unix:", pool_size=2) as server,
        Client(server.address, timeout_s=WAIT_S) as client,
    ):
        assert client.hurry(1) == (True, 1)
    assert "hurry" in caplog.text
