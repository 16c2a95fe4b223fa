"""Processes meet, or one error says who did not come: real sockets, in threads."""

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.distributed.clusters import Cluster
from replicator.distributed.meeting import server as meeting_server
from replicator.distributed.meeting.client import wait_for_all
from replicator.distributed.meeting.members import (
    Hello,
    Members,
    describe_missing,
    parse_hello,
)
from replicator.distributed.processes.ports import free_port
from replicator.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
)
from replicator.rpc import Secret
from replicator.rpc.security.authentication import ClientHandshake

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

    def __init__(
        self, pool, port, process_id, num_processes, timeout_s=LONG_S, **proof
    ):
        cluster = member(port, process_id, num_processes)
        self._future = pool.submit(
            wait_for_all, cluster, bind_host=None, timeout_s=timeout_s, **proof
        )

    def outcome(self):
        try:
            return self._future.result(LONG_S)
        except (DistributedError, AuthenticationError) as error:
            return error


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(params=[None, Secret.generate()], ids=["open", "proved"])
def secret(request):
    return request.param


@pytest.fixture
def jax_service():
    """Listen, as JAX's service does once the meeting has let go of its port."""
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


def test_three_processes_meet_and_learn_their_hosts(pool, jax_service, secret):
    port = free_port()
    hosts = [Host(pool, port, process, 3, secret=secret) for process in (2, 0, 1)]
    jax_service(port, hosts[1])
    assert [host.outcome() for host in hosts] == [[socket.gethostname()] * 3] * 3


def test_process_0_may_come_last(pool, jax_service, secret):
    port = free_port()
    first = Host(pool, port, 1, 2, secret=secret)
    zero = Host(pool, port, 0, 2, secret=secret)
    jax_service(port, zero)
    assert first.outcome() == zero.outcome() == [socket.gethostname()] * 2


def test_the_first_to_lose_patience_tells_all_who_is_missing(pool, secret):
    port = free_port()
    hosts = [
        Host(pool, port, 0, 4, LONG_S, secret=secret),
        Host(pool, port, 2, 4, 3.0, secret=secret),
    ]
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


def test_two_processes_of_one_number_are_refused_everywhere(pool, secret):
    port = free_port()
    hosts = [Host(pool, port, process, 3, secret=secret) for process in (0, 1, 1)]
    errors = [str(host.outcome()) for host in hosts]
    assert all(
        "`process_id` must differ in every process, got 1" in error for error in errors
    )


def test_another_count_of_processes_is_refused_everywhere(pool, secret):
    port = free_port()
    hosts = [
        Host(pool, port, 0, 3, secret=secret),
        Host(pool, port, 1, 2, secret=secret),
    ]
    errors = [str(host.outcome()) for host in hosts]
    assert all(
        "`num_processes` must be the same everywhere, got 2 in process 1" in error
        for error in errors
    )


def test_a_port_that_another_program_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        cluster = member(other.getsockname()[1], 0, 2)
        with pytest.raises(DistributedError, match="must be free, got 127"):
            wait_for_all(cluster, bind_host=None, timeout_s=LONG_S)


def test_an_address_of_another_host_is_refused():
    cluster = member(free_port(), 0, 2)
    with pytest.raises(DistributedError, match="must be an address of process 0's own"):
        wait_for_all(cluster, bind_host="192.0.2.1", timeout_s=1.0)


def test_a_host_that_nobody_knows_is_refused():
    cluster = member(free_port(), 0, 2)
    with pytest.raises(DistributedError, match="`coordinator` must name a host"):
        wait_for_all(cluster, bind_host="no-such-host.invalid", timeout_s=1)


STRANGERS = [b"GET / HTTP/1.0\n", b"\x80\x04.\n", b"{" * 5000, b"[]\n", b"", b"\n\n"]


def test_strangers_neither_enter_nor_stop_the_meeting(pool, jax_service, secret):
    port = free_port()
    zero = Host(pool, port, 0, 2, secret=secret)
    for said in STRANGERS:
        call(port, said)
    one = Host(pool, port, 1, 2, secret=secret)
    jax_service(port, zero)
    assert zero.outcome() == one.outcome() == [socket.gethostname()] * 2


def members(num_processes, timeout_s=LONG_S, *, has_tls=False):
    return Members(
        num_processes=num_processes,
        deadline_s=time.monotonic() + timeout_s,
        has_tls=has_tls,
        hosts={0: "a"},
    )


def test_a_stranger_that_speaks_as_another_takes_its_place_stops_nothing():
    address = ("127.0.0.1", free_port())
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(address))
        server = meeting_server._Server(listener, members(2, timeout_s=0.3), None)
        strangers = []
        for _ in range(meeting_server._MAX_UNIDENTIFIED):
            strangers.append(opened.enter_context(socket.create_connection(address)))
            server._accept()
        # Both are there when the server looks, the newcomer first.
        opened.enter_context(socket.create_connection(address))
        strangers[0].sendall(b"x")
        with pytest.raises(DistributedTimeoutError, match="process 1 of 2 did not"):
            server.serve()


def connected(port):
    """Connect as soon as somebody listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), LONG_S)


def call(port, sent):
    """Connect as soon as somebody listens, send something, and go."""
    with connected(port) as connection:
        connection.sendall(sent)


def test_a_program_that_is_not_process_0_is_not_believed(pool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        guest = Host(pool, other.getsockname()[1], 1, 2, 1.0)
        connection, _ = other.accept()
    with connection:
        connection.sendall(b'{"go": "anywhere"}\n')
    error = guest.outcome()
    assert isinstance(error, DistributedTimeoutError)
    assert "Process 0 must answer" in str(error)


def hello(process_id=1, **changed):
    said = {
        "num_processes": 2,
        "host": "b",
        "patience_s": 5.0,
        "clock_s": 0.0,
        "has_tls": False,
    }
    return Hello(process_id=process_id, **said | changed)


def arrive(hello, *, has_tls=False, clock_s=0.0):
    return members(2, has_tls=has_tls).arrive(hello, now_s=0.0, clock_s=clock_s)


def test_who_leaves_again_is_missing():
    entered = arrive(hello())
    assert isinstance(entered, Members)
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
        {"clock_s": -1},
        {"has_tls": 1},
    ],
)
def test_a_strange_greeting_is_none(changed):
    said = json.loads(hello().to_line()) | changed
    assert parse_hello(json.dumps(said).encode()) is None


@pytest.mark.parametrize(
    ("of_process_1", "certified"), [(False, "process 0"), (True, r"process 1 \(on b\)")]
)
def test_certificates_in_some_alone_are_refused(of_process_1, certified):
    said = arrive(hello(has_tls=of_process_1), has_tls=not of_process_1)
    assert re.search(f"got certificates in {certified} and none in", said)


@pytest.mark.parametrize(("clock_s", "side"), [(7200.0, "behind"), (0.0, "ahead")])
def test_a_clock_that_is_far_off_is_refused(clock_s, side):
    said = arrive(
        hello(clock_s=3600.0 * (side == "ahead") * 2, has_tls=True),
        has_tls=True,
        clock_s=clock_s,
    )
    assert f"7200 s {side} in process 1 (on b)" in said


def test_without_certificates_clocks_may_differ():
    assert isinstance(arrive(hello(clock_s=1e6)), Members)


def test_many_missing_processes_are_counted():
    described = describe_missing(list(range(1, 100)), 100)
    assert re.fullmatch(r"processes 1, 2, .*, 16 and 83 more of 100", described)


def test_another_runs_secret_is_refused_at_once(pool):
    port = free_port()
    zero = Host(pool, port, 0, 2, 3.0, secret=Secret.generate())
    error = Host(pool, port, 1, 2, secret=Secret.generate()).outcome()
    assert isinstance(error, AuthenticationError)
    assert "its secret is another one" in str(error)
    assert "without this run's secret: 1, the last from 127.0.0.1" in str(
        zero.outcome()
    )


def test_a_process_without_the_secret_is_told_what_it_lacks(pool):
    port = free_port()
    zero = Host(pool, port, 0, 2, 3.0, secret=Secret.generate())
    error = Host(pool, port, 1, 2).outcome()
    assert isinstance(error, AuthenticationError)
    assert "got none in process 1; process 0 asks for it" in str(error)
    assert isinstance(zero.outcome(), DistributedTimeoutError)


def test_a_process_0_without_the_secret_is_told_what_it_lacks(pool):
    port = free_port()
    hosts = [Host(pool, port, 0, 2), Host(pool, port, 1, 2, secret=Secret.generate())]
    told = [str(host.outcome()) for host in hosts]
    assert "got none in process 0 and one at 127.0.0.1" in told[0]
    assert "got one in process 1; process 0 has none" in told[1]


def test_a_program_that_proves_nothing_is_not_believed(pool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        guest = Host(pool, port, 1, 2, 1.0, secret=Secret.generate())
        connection, _ = other.accept()
    with connection:
        connection.sendall(b'{"go": ["anywhere", "and whoever comes there"]}\n')
    assert isinstance(guest.outcome(), DistributedTimeoutError)


@contextlib.contextmanager
def a_server(num_processes, secret=None):
    """Process 0, which takes its steps by the test, and its address."""
    address = ("127.0.0.1", free_port())
    with socket.create_server(address, backlog=256) as listener:
        server = meeting_server._Server(listener, members(num_processes), secret)
        try:
            yield server, address
        finally:
            server._answer_all()
            server._selector.close()


def come(opened, server, address, count, *, sent=b"", host="127.0.0.1"):
    """Open connections that the server accepts and reads; return its side of them."""
    for _ in range(count):
        connection = socket.create_connection(address, source_address=(host, 0))
        opened.enter_context(connection).sendall(sent)
        server._accept()
        server._read(server._connections[-1])
    return server._connections[-count:]


def test_processes_that_come_at_once_do_not_drop_each_other():
    with contextlib.ExitStack() as opened, a_server(200) as (server, address):
        come(opened, server, address, 199)
        assert len(server._connections) == 199


def test_a_flood_of_silence_does_not_drop_who_proves_itself():
    hello = ClientHandshake(Secret.generate(), binding="").hello()
    proof = Secret.generate()
    with contextlib.ExitStack() as opened, a_server(2, proof) as (server, address):
        [slow] = come(opened, server, address, 1, sent=hello)
        come(opened, server, address, 2 * meeting_server._MAX_UNIDENTIFIED)
        assert slow in server._connections


def test_a_flood_from_one_host_does_not_drop_another_one():
    hello = ClientHandshake(Secret.generate(), binding="").hello()
    proof = Secret.generate()
    flood = {"sent": hello, "host": "127.0.0.2"}
    with contextlib.ExitStack() as opened, a_server(2, proof) as (server, address):
        [slow] = come(opened, server, address, 1, sent=hello)
        come(opened, server, address, 2 * meeting_server._MAX_UNIDENTIFIED, **flood)
        assert slow in server._connections


def test_who_proved_nothing_is_not_answered(pool, jax_service):
    port, secret = free_port(), Secret.generate()
    zero = Host(pool, port, 0, 2, secret=secret)
    with connected(port) as stranger:
        one = Host(pool, port, 1, 2, secret=secret)
        jax_service(port, zero)
        assert one.outcome() == zero.outcome() == [socket.gethostname()] * 2
        assert stranger.recv(1 << 16) == b""
