"""Who reads in a server: quick calls, slow ones, many clients, clients that stall."""

import concurrent.futures
import contextlib
import dataclasses
import queue
import signal
import threading
import time

import pytest

from replicator.rpc.client.client import statistics
from replicator.rpc.codec.registry import Registry
from replicator.rpc.protocols import MessageKind
from replicator.rpc.server.selector_loop import IS_AVAILABLE
from replicator.rpc.server.served_call import current_call
from replicator.rpc.server.server import Server
from replicator.rpc.transports.connect import connect, listen
from tests.rpc.courier_cases import (
    LONG_S,
    NAMES,
    Probe,
    client_of,
    courier,
    serving,
    wait_until,
)
from tests.rpc.transports.ends import SECRET


@pytest.fixture(params=NAMES)
def transport(request):
    return request.param


@contextlib.contextmanager
def several_clients(server, count):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(client_of(server)) for _ in range(count)]


def made_quick(client, method, *args):
    for _ in range(20):
        client.call(method, args)


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_clients_come_and_go(transport, clients):
    with serving(transport) as server:
        for _ in range(3):
            with several_clients(server, clients) as callers:
                for number in range(12):
                    assert [c.echo(number) for c in callers] == [number] * clients
        with client_of(server) as client:
            assert client.echo("the last") == "the last"
        wait_until(lambda: server.statistics().connections <= 1)


def test_a_quick_method_that_blocks_holds_up_no_other_client(transport):
    with (
        serving(transport, probe := Probe()) as server,
        several_clients(server, 3) as (first, second, third),
    ):
        probe.go_on.set()
        made_quick(first, "hold")
        probe.go_on.clear()
        blocked = first.futures.hold()
        wait_until(lambda: probe.running == 1)
        assert second.echo(2) == 2
        assert third.echo(3) == 3
        assert first.echo(1) == 1
        probe.go_on.set()
        blocked.result(LONG_S)


def test_a_quick_method_that_blocks_can_be_cancelled(transport):
    with courier(transport) as (client, probe):
        probe.go_on.set()
        made_quick(client, "noop")
        future = client.futures.until_cancelled()
        wait_until(lambda: probe.running == 1)
        future.cancel()
        assert probe.saw_cancelled.wait(LONG_S)


def test_many_clients_at_once_get_their_own_answers(transport):
    def call_often(client, name):
        return [client.echo((name, n)) for n in range(50)]

    with (
        serving(transport, pool_size=2) as server,
        several_clients(server, 8) as callers,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(call_often, callers, range(8)))
    assert answers == [[(name, n) for n in range(50)] for name in range(8)]


@pytest.mark.skipif(not IS_AVAILABLE, reason="no epoll")
def test_one_thread_reads_all_sockets():
    with serving("unix") as server, several_clients(server, 12) as callers:
        for client in callers:
            made_quick(client, "noop")
        wait_until(lambda: server.statistics().connections == 12)
        assert len(server._service.selector_loop._watched) >= 11
        assert len(server._service.threads._members) < 14


def test_half_a_message_of_one_client_holds_up_no_other():
    with serving("unix") as server, several_clients(server, 2) as callers:
        half = connect(server.address, secret=SECRET, timeout_s=LONG_S)
        half._socket.send(b"\x40\x00")  # a frame begins
        for client in callers:
            made_quick(client, "noop")
        half.close()


def test_a_client_that_takes_no_reply_holds_up_no_other_and_few_threads():
    with serving("unix", pool_size=4) as server, several_clients(server, 2) as callers:
        made_quick(callers[0], "echo", 1)
        unread = connect(server.address, secret=SECRET, timeout_s=LONG_S)
        for number in range(1, 400):
            body = ["echo", [b"x" * 20_000], None, None]
            unread.send(MessageKind.CALL, number, body, timeout_s=LONG_S)
        wait_until(lambda: server.statistics().queued > 0)
        started_s = time.monotonic()
        for client in callers:
            made_quick(client, "noop")
        assert time.monotonic() - started_s < LONG_S / 2
        assert len(server._service.threads._members) < 20
        unread.close()


def test_a_call_sent_twice_runs_once():
    with serving("unix", probe := Probe()) as server:
        raw = connect(server.address, secret=SECRET, timeout_s=LONG_S)
        for _ in range(3):
            raw.send(
                MessageKind.CALL, 5, ["hold", ["once"], None, None], timeout_s=LONG_S
            )
        assert probe.started.acquire(timeout=LONG_S)
        # While the first runs the server has read the others: they came before.
        raw.send(MessageKind.PING, 0, [5], timeout_s=LONG_S)
        assert raw.receive(timeout_s=LONG_S).kind == MessageKind.PONG
        probe.go_on.set()
        assert raw.receive(timeout_s=LONG_S).payload.take() == "once"
        raw.close()
    assert probe.runs == 1


class Waits:
    """Its handler waits until nobody waits for it."""

    def __init__(self):
        self.was_cancelled = queue.SimpleQueue()

    def wait(self, value):
        self.was_cancelled.put(current_call().wait_cancelled(LONG_S))


@contextlib.contextmanager
def a_call_that_is_slow_to_read():
    """Send a call; yield the connection, and what lets the server read its argument."""
    registry, is_read, go_on = Registry(), threading.Event(), threading.Event()

    @registry.register
    @dataclasses.dataclass
    class Slow:
        number: int

        def __post_init__(self):
            if self.number:  # not here, where it is made
                is_read.set()
                go_on.wait(LONG_S)

    slow = Slow(0)
    slow.number = 1
    listener = listen("unix:", secret=SECRET, registry=registry)
    with (
        Server(waits := Waits(), listeners=[listener]) as server,
        contextlib.closing(
            connect(server.address, secret=SECRET, registry=registry, timeout_s=LONG_S)
        ) as raw,
    ):
        raw.send(MessageKind.CALL, 7, ["wait", [slow], None, None], timeout_s=LONG_S)
        assert is_read.wait(LONG_S)
        yield raw, waits, go_on


def known(raw, *call_ids):
    """Return which of these calls the server knows."""
    raw.send(MessageKind.PING, 1, call_ids, timeout_s=LONG_S)
    pong = raw.receive(timeout_s=LONG_S)
    assert pong.kind == MessageKind.PONG
    return [call_id for call_id, _, _ in pong.payload.take()]


def test_a_ping_that_overtakes_its_call_hears_that_it_waits():
    with a_call_that_is_slow_to_read() as (raw, _, go_on):
        assert known(raw, 7, 8) == [7]
        go_on.set()


def test_a_cancellation_that_overtakes_its_call_reaches_it():
    with a_call_that_is_slow_to_read() as (raw, waits, go_on):
        raw.send(MessageKind.CANCEL, 7, None, timeout_s=LONG_S)
        assert known(raw, 7) == [7]
        go_on.set()
        wait_until(lambda: known(raw, 7) == [])
        assert waits.was_cancelled.empty() or waits.was_cancelled.get()


def test_a_reader_that_a_signal_interrupts_gives_its_call_up_and_connects_again():
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        if not has_come.is_set():
            has_come.set()
            raise Interrupted

    has_come = threading.Event()
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with courier("unix") as (client, probe):

            def interrupt_what_has_begun():
                assert probe.started.acquire(timeout=LONG_S)
                # One that comes just before a wait does not end it.
                while not has_come.wait(0.05):
                    signal.pthread_kill(main, signal.SIGUSR1)

            thread = threading.Thread(target=interrupt_what_has_begun)
            thread.start()
            with pytest.raises(Interrupted):
                client.until_cancelled()
            thread.join(LONG_S)
            assert probe.saw_cancelled.wait(LONG_S)
            assert client.echo("again") == "again"
            assert statistics(client).connections == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
