"""What happens to calls when a process dies, stops, or does not read.

Each fault ends within its bound, with an error that names method, server and address.
"""

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from replicator.errors import CallTimeoutError, ConnectionLostError
from replicator.rpc.client.client import Client, statistics
from replicator.rpc.protocols import MessageKind
from replicator.rpc.server.server import Server
from replicator.rpc.transports.connect import connect
from tests.multiprocess.processes import stop
from tests.multiprocess.rpc_processes import LONG_S, process
from tests.rpc.courier_cases import Probe, wait_until
from tests.rpc.fakes import Faults, faulty

pytestmark = pytest.mark.slow


@pytest.fixture
def address(tmp_path):
    tmp_path.chmod(0o700)
    return f"unix:{tmp_path}/socket"


def kill_in_two_calls(server, address):
    """Kill a server once two calls of `hold` run there."""
    with Client(address) as watching:
        wait_until(lambda: statistics(watching).methods["hold"].running == 2)
        server.kill()


def test_a_server_killed_in_a_call_is_noticed_at_once_and_named(address):
    with process("serve", address) as server, Client(address) as client:
        client.echo(1)
        future = client.futures.hold()
        killer = threading.Thread(target=kill_in_two_calls, args=(server, address))
        killer.start()
        with pytest.raises(
            ConnectionLostError, match=r"`hold` of 'target'.*may have run"
        ):
            client.call("hold", timeout_s=1000.0)
        killer.join(LONG_S)
        with pytest.raises(ConnectionLostError, match=address):
            future.result(LONG_S)


def test_a_server_killed_and_started_again_is_found_by_the_next_call(address):
    with Client(address, timeout_s=LONG_S) as client:
        with process("serve", address) as first:
            assert client.pid() == first.pid
        with process("serve", address) as second:
            assert client.pid() == second.pid


def test_an_idempotent_call_outlives_its_server(address, tmp_path):
    journal = tmp_path / "journal"
    with Client(address, timeout_s=LONG_S) as client:
        with process("serve", address, journal) as first:
            future = client.futures.add_once(7, seconds=5.0)
            wait_until(journal.exists)
            first.kill()
        with process("serve", address, journal):
            assert client.call("add_once", [8]) == 8
            assert future.result(LONG_S) == 7
    assert journal.read_text().split() in (["7", "8", "7"], ["7", "7", "8"])


def test_a_client_killed_in_a_call_frees_its_handler(address):
    with Server(probe := Probe(), address=address) as server:
        for _ in range(3):
            with process("call", address, "until_cancelled") as client:
                assert probe.started.acquire(timeout=LONG_S)
                probe.saw_cancelled.clear()
                client.kill()
                assert probe.saw_cancelled.wait(LONG_S / 2)
            probe.go_on.set()
            wait_until(lambda: server.statistics().running == 0, LONG_S / 2)
            probe.go_on.clear()
        probe.go_on.set()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_clients_gone_in_a_call_leave_nothing(address):
    with (
        Server(probe := Probe(), address=address, pool_size=4) as server,
        Client(address) as client,
        Client(address) as second,
    ):
        client.echo(1)
        second.echo(1)  # with two the server watches all of them together
        gc.collect()
        before = threading.active_count(), descriptors()
        for number in range(1000):
            call_and_vanish(address, number)
        probe.go_on.set()
        wait_until(lambda: len(server._service.connections) == 2, LONG_S / 2)
        wait_until(lambda: server._service.calls_left == 0, LONG_S / 2)
        gc.collect()
        wait_until(lambda: descriptors() <= before[1], LONG_S / 2)
        wait_until(lambda: threading.active_count() <= before[0] + 8, LONG_S / 2)
        assert client.echo(2) == 2


def call_and_vanish(address, number):
    lost = connect(address, timeout_s=LONG_S)
    body = ["until_cancelled", None, None, LONG_S]
    lost.send(MessageKind.CALL, number, body, timeout_s=LONG_S)
    lost.close()


def test_a_stuck_handler_ends_in_an_error_that_says_so(address):
    with process("serve", address), Client(address, heartbeat_s=0.1) as client:
        client.echo(1)
        for timeout_s in (3.0, 20.0):  # a busy machine may not tell of it in time
            with pytest.raises(CallTimeoutError) as late:
                client.call("hold", timeout_s=timeout_s)
            if "had run for" in str(late.value):
                break
        assert re.search(r"answers pings.*had run for", str(late.value))
        assert client.echo("others get through") == "others get through"


def test_a_stopped_server_is_told_to_be_silent_and_found_again(address, caplog):
    with (
        process("serve", address) as server,
        Client(address, heartbeat_s=0.1) as client,
    ):
        client.echo(1)
        stop(server)
        started_s = time.monotonic()
        with pytest.raises(
            CallTimeoutError, match=r"no sign of life.*stopped, stuck or"
        ):
            client.call("echo", [2], timeout_s=1.5)
        assert time.monotonic() - started_s < LONG_S / 2
        assert "has given no sign of life" in caplog.text
        server.send_signal(signal.SIGCONT)
        assert client.call("echo", [3], timeout_s=LONG_S) == 3


def test_a_handler_that_holds_the_interpreter_is_told_to_be_silent(address, tmp_path):
    os.mkfifo(gate := tmp_path / "gate")
    with process("serve", address), Client(address, heartbeat_s=0.1) as client:
        client.echo(1)
        with pytest.raises(CallTimeoutError, match="no sign of life"):
            client.call("hold_the_interpreter", [str(gate)], timeout_s=2.0)
        gate.write_bytes(b"x")
        assert client.call("echo", [2], timeout_s=LONG_S) == 2


def rss_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_client_that_does_not_read_holds_up_no_other_and_fills_no_memory(address):
    with process("serve", address) as server, Client(address) as client:
        client.echo(1)
        unread = connect(address, timeout_s=LONG_S)
        before = rss_bytes(server.pid)
        for number in range(1, 200):
            body = ["many_bytes", [200_000], None, None]
            unread.send(MessageKind.CALL, number, body, timeout_s=LONG_S)

        def is_full_or_done():
            known = statistics(client).methods["many_bytes"]
            return known.running >= 1 or known.calls == 199

        wait_until(is_full_or_done)
        # One that had to wait for the other's socket would wait for ever.
        assert [client.echo(n) for n in range(1_000)] == [*range(1_000)]
        assert rss_bytes(server.pid) - before < 64 << 20
        unread.close()


@pytest.mark.parametrize("chances", [{"lose": 0.25}, {"break_off": 0.02}])
def test_ten_thousand_idempotent_calls_are_answered_whatever_is_lost(address, chances):
    faults = Faults(**chances)
    with (
        Server(probe := Probe(), address=address) as server,
        Client(
            address,
            dial=faulty(server.address, faults, secret=None),
            heartbeat_s=0.02,
            timeout_s=None,
        ) as client,
    ):
        results = []
        # Each connection that breaks off takes all calls on it along.
        for _ in range(25):
            futures = [client.futures.add_once() for _ in range(400)]
            results += [future.result(10 * LONG_S) for future in futures]
    assert len(set(results)) == 10_000 <= probe.runs
    assert faults.happened.total() > 100
