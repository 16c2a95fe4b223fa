"""How a server starts and stops, and what it lets a client do."""

import concurrent.futures
import logging
import threading
import time

import numpy as np
import pytest

import replicator.rpc.server.server as server_module
from replicator.errors import (
    AddressInUseError,
    ArgumentError,
    CallTimeoutError,
    RpcError,
)
from replicator.rpc.batching.batching import batched_handler
from replicator.rpc.client.client import Client, statistics
from replicator.rpc.server.methods import idempotent
from replicator.rpc.server.served_call import cancelled, current_call
from replicator.rpc.server.server import Server
from tests.rpc.courier_cases import (
    LONG_S,
    Probe,
    client_of,
    courier,
    serving,
    wait_until,
)
from tests.rpc.transports.ends import SECRET, TRANSPORTS


@pytest.fixture(autouse=True)
def cancelled_handlers_have_little_time(monkeypatch):
    monkeypatch.setattr(server_module, "CANCEL_S", 0.05)


def test_by_default_a_server_is_in_this_process_and_at_a_private_socket():
    with Server(Probe()) as server:
        assert server.name == "Probe"
        assert server.address.startswith("inproc:")
        assert ",unix:/" in server.address


def test_functions_can_be_served_without_an_object():
    read = idempotent(lambda: "read")
    server = Server().bind("double", lambda x: 2 * x).bind("read", read)
    with server, Client(server.address) as client:
        assert client.double(4) == 8
        assert client.read() == "read"


def test_a_function_takes_the_place_of_a_method():
    server = Server(Probe()).bind("echo", lambda x: "mine")
    with server, Client(server.address) as client:
        assert client.echo(1) == "mine"


def test_nothing_is_bound_once_a_server_runs():
    with Server(Probe()) as server, pytest.raises(ArgumentError, match="before"):
        server.bind("double", lambda x: 2 * x)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pool_size": 0}, "pool_size"),
        ({"address": "tcp://x"}, "address"),
        ({"instance": Probe}, "instance"),
    ],
)
def test_what_cannot_be_served_is_refused(options, named):
    with pytest.raises(ArgumentError, match=named):
        Server(**({"instance": Probe()} | options))


def test_a_server_without_methods_does_not_start():
    with pytest.raises(ArgumentError, match="must offer a method"):
        Server().start()


def test_a_server_starts_once():
    with Server(Probe()) as server, pytest.raises(ArgumentError, match="once"):
        server.start()


def test_a_server_has_no_address_before_it_started():
    with pytest.raises(RpcError, match="start"):
        Server(Probe()).address  # noqa: B018


def test_an_address_in_use_is_refused_with_its_owner_and_leaves_nothing(tmp_path):
    tmp_path.chmod(0o700)
    address = f"unix:{tmp_path}/socket"
    with Server(Probe(), address=address):
        with pytest.raises(AddressInUseError, match="process"):
            Server(Probe(), address=f"inproc:left-over,{address}").start()
        with Server(Probe(), address="inproc:left-over"):
            pass


def test_stopping_answers_the_calls_there_are():
    with serving("unix", probe := Probe()) as server, client_of(server) as client:
        future = client.futures.hold("answered")
        assert probe.started.acquire(timeout=LONG_S)
        threading.Timer(0.05, probe.go_on.set).start()
        server.stop()
        assert future.result(LONG_S) == "answered"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_stops_takes_no_more_calls(transport):
    with (
        serving(transport, probe := Probe()) as server,
        client_of(server) as client,
        client_of(server) as other,
    ):
        first = client.futures.hold("answered")
        assert probe.started.acquire(timeout=LONG_S)
        other.echo(1)
        stopping = threading.Thread(target=server.stop, args=(LONG_S,))
        stopping.start()
        wait_until(lambda: server._is_stopping)
        with pytest.raises(CallTimeoutError, match=r"`add_once` of .*was not called"):
            other.call("add_once", timeout_s=0.3)
        probe.go_on.set()
        assert first.result(LONG_S) == "answered"
        stopping.join(LONG_S)
    assert probe.runs == 1


def test_stopping_is_bounded_and_names_the_handlers_that_do_not_end(caplog):
    with serving("unix", probe := Probe()) as server, client_of(server) as client:
        future = client.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        started_s = time.monotonic()
        server.stop(drain_s=0.1)
        assert time.monotonic() - started_s < LONG_S / 2
        assert "still running: `hold`" in caplog.text
        assert future.exception(LONG_S) is not None


def test_handlers_hear_of_the_end_when_they_take_too_long():
    with serving("unix", probe := Probe()) as server, client_of(server) as client:
        client.futures.until_cancelled()
        assert probe.started.acquire(timeout=LONG_S)
        server.stop(drain_s=0.0)
        assert probe.saw_cancelled.wait(LONG_S)


def test_a_second_stop_shortens_the_first():
    with serving("unix", probe := Probe()) as server, client_of(server) as client:
        client.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        first = threading.Thread(target=server.stop, args=(LONG_S,))
        first.start()
        wait_until(lambda: server._is_stopping)
        started_s = time.monotonic()
        server.stop(0.0)
        assert server.wait(0)
        assert time.monotonic() - started_s < LONG_S / 2
        first.join(LONG_S)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handler_may_stop_its_server_and_its_caller_is_answered(transport):
    class Stoppable:
        def stop(self):
            server.stop()
            return "stopping"

    with serving(transport, Stoppable()) as server, client_of(server) as client:
        assert client.stop() == "stopping"
        assert server.wait(LONG_S)


def test_a_handler_may_not_wait_for_its_own_end():
    class Waiting:
        def wait(self):
            server.wait()

    with (
        serving("in-process", Waiting()) as server,
        client_of(server) as client,
        pytest.raises(RuntimeError, match="waits for its end"),
    ):
        client.wait()


def test_nothing_is_left_of_a_stopped_server(tmp_path):
    before = threading.active_count()
    with courier("unix") as (client, _):
        client.echo(1)
        client.futures.echo(2).result(LONG_S)
    wait_until(lambda: threading.active_count() <= before)


def test_outside_of_a_handler_there_is_no_call():
    assert current_call() is None
    assert not cancelled()


def test_a_handler_knows_its_call():
    class Curious:
        def look(self):
            call = current_call()
            return [call.method, 0 < call.remaining_s() <= 60, cancelled(), call.peer]

    with courier(instance=Curious()) as (client, _):
        for _ in range(10):  # in the pool, then in the thread that reads
            known = client.call("look", timeout_s=60)
            assert known[:3] == ["look", True, False]


def test_a_client_with_too_much_in_flight_is_read_no_further():
    limits = {"in_flight_calls": 4}
    for transport in ("in-process", "unix"):
        with courier(transport, limits=limits, pool_size=2) as (client, probe):
            futures = [client.futures.hold(n) for n in range(20)]
            for _ in range(2):
                assert probe.started.acquire(timeout=LONG_S)
            with client_of_same(client) as other:
                wait_until(lambda: under_way(other) >= 4)
                assert under_way(other) == 4
            probe.go_on.set()
            assert [f.result(LONG_S) for f in futures] == list(range(20))


def under_way(client):
    known = statistics(client)
    return known.running + known.queued


def client_of_same(client):
    return Client(client.address, secret=SECRET, timeout_s=LONG_S)


def test_a_flood_of_one_client_does_not_starve_another():
    class Ordered(Probe):
        def note(self, who):
            order.append(who)

    order = []
    with (
        serving("unix", probe := Ordered(), pool_size=1) as server,
        client_of(server) as flood,
        client_of(server) as other,
    ):
        first = flood.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        waiting = [flood.futures.note("flood") for _ in range(50)]
        wait_until(lambda: server.statistics().queued == 50)
        waiting.append(other.futures.note("mine"))
        wait_until(lambda: server.statistics().queued == 51)
        probe.go_on.set()
        concurrent.futures.wait([first, *waiting], timeout=LONG_S)
    assert len(order) == 51
    assert order.index("mine") <= 2


@pytest.mark.parametrize(("pool_size", "crowd"), [(16, 20), (64, 80)])
def test_waiting_calls_of_one_client_leave_places_to_others(pool_size, crowd):
    with (
        serving("unix", probe := Probe(), pool_size=pool_size) as server,
        client_of(server) as waiting,
        client_of(server) as other,
    ):
        for _ in range(crowd):
            waiting.futures.hold()
        for _ in range(pool_size - pool_size // 16):
            assert probe.started.acquire(timeout=LONG_S)
        assert other.echo(3) == 3


def test_one_client_may_have_as_many_places_as_calls_that_run_together():
    class Merged(Probe):
        def __init__(self):
            super().__init__()
            self.size = batched_handler(32, timeout_s=LONG_S)(self.size)

        def size(self, numbers):
            return np.full(len(numbers), len(numbers))

    with (
        serving("unix", Merged(), pool_size=32) as server,
        client_of(server) as client,
    ):
        waiting = [client.futures.size(1) for _ in range(32)]
        assert [each.result(LONG_S) for each in waiting] == [32] * 32


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_a_program_ends_neither_server_nor_caller(error):
    class Ending:
        def end(self):
            raise error

    with courier("unix", instance=Ending()) as (client, _):
        for _ in range(8):
            with pytest.raises(RpcError) as caught:
                client.end()
            assert caught.value.type_name == type(error).__name__
            assert not isinstance(caught.value, type(error))


def test_a_pool_too_small_for_a_batch_is_told_at_the_start(caplog):
    class Model:
        @batched_handler(8)
        def predict(self, x):
            return x

    with caplog.at_level(logging.WARNING), Server(Model(), pool_size=4):
        assert "`predict` merges 8 calls, and `pool_size` is 4" in caplog.text


def test_a_batched_method_gets_its_batch_from_futures_of_one_client():
    sizes = []

    class Model:
        @batched_handler(8, timeout_s=LONG_S)
        def predict(self, x):
            sizes.append(len(x))
            return x

    with courier("unix", instance=Model()) as (client, _):
        futures = [client.futures.predict(n) for n in range(24)]
        assert [int(f.result(LONG_S)) for f in futures] == list(range(24))
    assert sizes == [8, 8, 8]
