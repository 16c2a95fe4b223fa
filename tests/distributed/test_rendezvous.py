"""Processes meet, or one error says who did not come: real sockets, in threads."""

import contextlib
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.distributed import rendezvous_server
from replicator.distributed.clusters import Cluster
from replicator.distributed.processes.ports import free_port
from replicator.distributed.rendezvous import meet
from replicator.distributed.roster import (
    Hello,
    Roster,
    describe_missing,
    parse_hello,
)
from replicator.errors import DistributedError, DistributedTimeoutError

LONG_S = 60.0


def member(port, process_id, num_processes):
    return Cluster(
        kind="arguments",
        coordinator=f"127.0.0.1:{port}",
        num_processes=num_processes,
        process_id=process_id,
    )


class Host:
    """One process of a group, in a thread; `outcome` waits for how it ends."""

    def __init__(self, pool, port, process_id, num_processes, timeout_s=LONG_S):
        cluster = member(port, process_id, num_processes)
        self._future = pool.submit(meet, cluster, bind_host=None, timeout_s=timeout_s)

    def outcome(self):
        try:
            return self._future.result(LONG_S)
        except DistributedError as error:
            return error


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def jax_service():
    """Listen, as JAX's service does once the rendezvous has let go of its port."""
    stop = threading.Event()
    started = []

    def start(port, after):
        def listen():
            after.outcome()
            with socket.create_server(("127.0.0.1", port)):
                stop.wait(LONG_S)

        started.append(threading.Thread(target=listen))
        started[-1].start()

    yield start
    stop.set()
    for thread in started:
        thread.join()


def test_three_processes_meet_and_learn_their_hosts(pool, jax_service):
    port = free_port()
    hosts = [Host(pool, port, process, 3) for process in (2, 0, 1)]
    jax_service(port, hosts[1])
    assert [host.outcome() for host in hosts] == [[socket.gethostname()] * 3] * 3


def test_process_0_may_come_last(pool, jax_service):
    port = free_port()
    first = Host(pool, port, 1, 2)
    zero = Host(pool, port, 0, 2)
    jax_service(port, zero)
    assert first.outcome() == zero.outcome() == [socket.gethostname()] * 2


def test_the_first_to_lose_patience_tells_all_who_is_missing(pool):
    port = free_port()
    hosts = [Host(pool, port, 0, 4, LONG_S), Host(pool, port, 2, 4, 1.5)]
    errors = [host.outcome() for host in hosts]
    assert all(isinstance(error, DistributedTimeoutError) for error in errors)
    assert all("processes 1, 3 of 4 did not" in str(error) for error in errors)
    assert str(errors[0]) == str(errors[1])


def test_without_process_0_its_address_is_named(pool):
    port = free_port()
    error = Host(pool, port, 1, 2, 0.3).outcome()
    assert isinstance(error, DistributedTimeoutError)
    assert f"Process 0 must answer at 127.0.0.1:{port} within 0.3 s" in str(error)
    assert "Connection refused" in str(error)


def test_two_processes_of_one_number_are_refused_everywhere(pool):
    port = free_port()
    hosts = [Host(pool, port, process, 3) for process in (0, 1, 1)]
    errors = [str(host.outcome()) for host in hosts]
    assert all(
        "`process_id` must differ in every process, got 1" in error for error in errors
    )


def test_another_count_of_processes_is_refused_everywhere(pool):
    port = free_port()
    hosts = [Host(pool, port, 0, 3), Host(pool, port, 1, 2)]
    errors = [str(host.outcome()) for host in hosts]
    assert all(
        "`num_processes` must be the same everywhere, got 2 in process 1" in error
        for error in errors
    )


def test_a_port_that_another_program_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        cluster = member(other.getsockname()[1], 0, 2)
        with pytest.raises(DistributedError, match="must be free, got 127"):
            meet(cluster, bind_host=None, timeout_s=LONG_S)


def test_an_address_of_another_host_is_refused():
    cluster = member(free_port(), 0, 2)
    with pytest.raises(DistributedError, match="must be an address of process 0's own"):
        meet(cluster, bind_host="192.0.2.1", timeout_s=1.0)


def test_a_host_that_nobody_knows_is_refused():
    cluster = member(free_port(), 0, 2)
    with pytest.raises(DistributedError, match="`coordinator` must name a host"):
        meet(cluster, bind_host="no-such-host.invalid", timeout_s=1)


STRANGERS = [b"GET / HTTP/1.0\n", b"\x80\x04.\n", b"{" * 5000, b"[]\n", b"", b"\n\n"]


def test_strangers_neither_enter_nor_stop_the_rendezvous(pool, jax_service):
    port = free_port()
    zero = Host(pool, port, 0, 2)
    for said in STRANGERS:
        call(port, said)
    one = Host(pool, port, 1, 2)
    jax_service(port, zero)
    assert zero.outcome() == one.outcome() == [socket.gethostname()] * 2


def test_a_stranger_that_speaks_as_another_takes_its_place_stops_nothing():
    cluster = member(free_port(), 0, 2)
    address = ("127.0.0.1", cluster.port)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(address))
        server = rendezvous_server._Server(listener, cluster, timeout_s=0.3)
        strangers = []
        for _ in range(rendezvous_server._MAX_STRANGERS):
            strangers.append(opened.enter_context(socket.create_connection(address)))
            server._accept()
        # Both are there when the server looks, the newcomer first.
        opened.enter_context(socket.create_connection(address))
        strangers[0].sendall(b"x")
        with pytest.raises(DistributedTimeoutError, match="process 1 of 2 did not"):
            server.serve()


def call(port, said):
    """Connect as soon as somebody listens, say something, and go."""
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), LONG_S) as connection:
                connection.sendall(said)
            return
        except ConnectionRefusedError:
            continue


def test_a_program_that_is_not_process_0_is_not_believed(pool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        guest = Host(pool, other.getsockname()[1], 1, 2, 1.0)
        connection, _ = other.accept()
    with connection:
        connection.sendall(b'{"go": "anywhere"}\n')
    error = guest.outcome()
    assert isinstance(error, DistributedTimeoutError)
    assert "Process 0 must answer" in str(error)


def hello(process_id=1, *, num_processes=2, patience_s=5.0):
    return Hello(
        process_id=process_id,
        num_processes=num_processes,
        host="b",
        patience_s=patience_s,
    )


def test_who_leaves_again_is_missing():
    roster = Roster(num_processes=2, deadline_s=9.0, hosts={0: "a"})
    entered = roster.arrive(hello(), now_s=0.0)
    assert isinstance(entered, Roster)
    assert entered.is_complete
    assert entered.leave(1).missing == [1]


def test_a_greeting_survives_the_wire():
    assert parse_hello(hello().to_line()) == hello()


@pytest.mark.parametrize(
    "changed",
    [
        {"host": "a\x1b[2J"},
        {"host": ""},
        {"patience_s": float("inf")},
        {"patience_s": -1},
        {"patience_s": float("nan")},
        {"process_id": None},
        {"process_id": "x"},
    ],
)
def test_a_strange_greeting_is_none(changed):
    said = json.loads(hello().to_line()) | changed
    assert parse_hello(json.dumps(said).encode()) is None


def test_many_missing_processes_are_counted():
    described = describe_missing(list(range(1, 100)), 100)
    assert re.fullmatch(r"processes 1, 2, .*, 16 and 83 more of 100", described)
