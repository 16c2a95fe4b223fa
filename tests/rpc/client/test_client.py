"""How a client finds its server, again too, and what it does about lost calls."""

import concurrent.futures
import dataclasses
import threading
import time

import pytest

import replicator.rpc.server.server as server_module
from replicator.errors import (
    ArgumentError,
    AuthenticationError,
    CallCancelledError,
    CallTimeoutError,
    ConnectionLostError,
    DecodeError,
    RemoteError,
    ServerStoppedError,
)
from replicator.rpc.client.client import Client, fail_fast, list_methods
from replicator.rpc.codec.registry import Registry
from replicator.rpc.protocols import MessageKind
from replicator.rpc.security.secret import Secret
from replicator.rpc.server import served_call
from replicator.rpc.server.server import Server
from replicator.rpc.transports.connect import connect, listen
from tests.rpc.courier_cases import (
    LONG_S,
    Probe,
    client_of,
    courier,
    serving,
)
from tests.rpc.fakes import Faults, FaultyConnection, faulty, nobody
from tests.rpc.transports.ends import SECRET


def on_socket(path, instance=None):
    return Server(instance or Probe(), name="probe", address=f"unix:{path}")


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "socket"


@pytest.fixture(autouse=True)
def cancelled_handlers_have_little_time(monkeypatch):
    monkeypatch.setattr(server_module, "CANCEL_S", 0.05)


def test_a_client_connects_at_its_first_call_only():
    with Client("inproc:nobody-is-here") as client:
        assert client.address == "inproc:nobody-is-here"


def test_waiting_for_a_server_is_bounded_by_the_deadline():
    started_s = time.monotonic()
    with (
        Client("inproc:nobody-is-here", timeout_s=0.3) as client,
        pytest.raises(CallTimeoutError, match=r"`add` of .*was not called.* [\d.]+ s"),
    ):
        client.add(1)
    assert 0.3 <= time.monotonic() - started_s < LONG_S / 2


def test_wait_for_ready_is_bounded_by_its_own_deadline():
    with (
        Client("inproc:nobody-is-here", wait_for_ready=False) as client,
        pytest.raises(CallTimeoutError, match="no server was ready"),
    ):
        client.wait_for_ready(timeout_s=0.1)


def test_a_future_waits_for_a_server_without_its_caller():
    with Client("inproc:nobody-is-here", timeout_s=LONG_S) as client:
        assert not client.futures.add(1).done()
        started_s = time.monotonic()
        with pytest.raises(CallTimeoutError, match="was not called"):
            client.futures.call("add", [1], timeout_s=0.3).result(LONG_S)
        assert time.monotonic() - started_s < LONG_S / 2


def test_a_client_that_does_not_wait_says_at_once_that_nobody_is_there():
    with Client("inproc:nobody-is-here", wait_for_ready=False) as client:
        with pytest.raises(ConnectionLostError, match=r"`add` of .*failed to connect"):
            client.add(1)
        with pytest.raises(ConnectionLostError, match="Nobody listens"):
            client.futures.add(1).result(LONG_S)


def test_calls_under_way_are_told_that_no_server_will_come():
    with Client("inproc:nobody-is-here", timeout_s=LONG_S) as client:
        future = client.futures.add(1)
        fail_fast(client)
        with pytest.raises(ConnectionLostError):
            future.result(LONG_S)
        with pytest.raises(ConnectionLostError):
            client.add(1)


def test_calls_wait_for_a_server_that_starts_later(path):
    with Client(f"unix:{path}", timeout_s=LONG_S) as client:
        futures = [client.futures.echo(n) for n in range(3)]
        with on_socket(path):
            assert client.echo("late") == "late"
            assert [future.result(LONG_S) for future in futures] == [0, 1, 2]


def test_a_server_that_was_started_again_is_found_by_the_next_call(path):
    with Client(f"unix:{path}", timeout_s=LONG_S) as client:
        for number in range(3):
            with on_socket(path):
                assert client.echo(number) == number
                assert client.futures.echo(number).result(LONG_S) == number


@pytest.mark.parametrize("wait_for_ready", [True, False])
def test_a_dead_link_is_made_again_without_an_error(path, wait_for_ready):
    with Client(f"unix:{path}", wait_for_ready=wait_for_ready) as client:
        with on_socket(path):
            client.echo(1)
        with on_socket(path):
            assert client.echo(2) == 2


def test_another_programs_server_is_refused_at_once(path):
    with (
        on_socket(path) as server,
        Client(server.address, secret=Secret.generate()) as client,
    ):
        with pytest.raises(AuthenticationError):
            client.echo(1)
        with pytest.raises(AuthenticationError):
            client.futures.echo(1).result(LONG_S)


def test_private_names_are_not_methods():
    with Client("inproc:x") as client:
        for owner in (client, client.futures):
            with pytest.raises(AttributeError):
                owner._private  # noqa: B018


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(seconds):
    with pytest.raises(ArgumentError, match="timeout_s"):
        Client("inproc:x", timeout_s=seconds)
    with courier() as (client, _), pytest.raises(ArgumentError, match="timeout_s"):
        client.call("echo", timeout_s=seconds)


def test_a_call_without_deadline_must_be_written_so():
    with courier() as (client, probe):
        future = client.futures.call("until_cancelled", timeout_s=None)
        assert probe.started.acquire(timeout=LONG_S)
        assert probe.remaining_s is None
        future.cancel()


def test_the_object_itself_may_be_called():
    class Adder:
        def __call__(self, a, b=0):
            return a + b

    with courier(instance=Adder()) as (client, _):
        assert client(1, b=2) == 3
        assert client.futures(4).result(LONG_S) == 4


def test_a_method_with_a_name_of_the_client_is_called_by_its_name():
    class Odd:
        def call(self, x):
            return f"call {x}"

        def close(self):
            return "closed"

    with courier(instance=Odd()) as (client, _):
        assert client.call("call", [1]) == "call 1"
        assert client.futures.call("close").result(LONG_S) == "closed"
        assert list_methods(client) == ["call", "close"]


def lossy(server, faults, **options):
    options = {"timeout_s": LONG_S, "heartbeat_s": 0.02} | options
    return Client(server.address, dial=faulty(server.address, faults), **options)


@pytest.mark.parametrize("chances", [{"lose": 0.25}, {"break_off": 0.25}])
def test_an_idempotent_call_is_made_again_until_it_is_answered(chances):
    faults = Faults(**chances)
    with (
        serving("in-process", probe := Probe()) as server,
        lossy(server, faults) as client,
    ):
        results = [client.add_once() for _ in range(40)]
    assert results == sorted(set(results))
    assert len(results) == 40 <= probe.runs <= 40 + faults.happened.total()
    assert faults.happened.total() > 5


@pytest.mark.parametrize("chances", [{"lose": 0.25}, {"break_off": 0.1}])
def test_idempotent_futures_are_made_again_until_they_are_answered(chances):
    faults = Faults(**chances)
    with (
        serving("in-process", probe := Probe()) as server,
        lossy(server, faults) as client,
    ):
        futures = [client.futures.add_once() for _ in range(60)]
        results = [future.result(LONG_S) for future in futures]
    assert len(set(results)) == 60 <= probe.runs
    assert faults.happened.total() >= 5  # of the first sixty draws


def test_a_reply_that_comes_twice_is_taken_once():
    faults = Faults(repeat=1.0)
    with serving() as server, lossy(server, faults) as client:
        assert [client.echo(n) for n in range(20)] == list(range(20))
        futures = [client.futures.echo(n) for n in range(20)]
        assert [future.result(LONG_S) for future in futures] == list(range(20))
    assert faults.happened["repeat"] == 40


@pytest.mark.parametrize(
    ("chances", "why"),
    [({"lose": 1.0}, "knows nothing of the call"), ({"break_off": 1.0}, "was lost")],
)
def test_another_call_is_not_sent_again_and_the_error_says_that_it_may_have_run(
    chances, why
):
    with serving() as server, lossy(server, Faults(**chances)) as client:
        with pytest.raises(
            ConnectionLostError, match=f"`echo` of .*may have run.*{why}"
        ):
            client.echo(1)
        with pytest.raises(
            ConnectionLostError, match=f"`echo` of .*may have run.*{why}"
        ):
            client.futures.echo(1).result(LONG_S)


def test_retries_end_with_the_deadline():
    started_s = time.monotonic()
    with (
        serving() as server,
        lossy(server, Faults(lose=1.0), timeout_s=0.3) as client,
        pytest.raises(CallTimeoutError, match="`add_once` of 'probe'"),
    ):
        client.add_once()
    assert time.monotonic() - started_s < LONG_S / 2


def test_a_call_whose_link_breaks_while_it_runs_runs_again_beside_it():
    with (
        courier(instance=(probe := Probe())) as (client, _),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(client.hold_once)
        assert probe.started.acquire(timeout=LONG_S)
        client._calls.connector.link.connection.close()
        assert probe.started.acquire(timeout=LONG_S)
        probe.go_on.set()
        assert result.result(LONG_S) == "once"
    assert probe.most_running == probe.runs == 2


def test_a_silent_server_is_told_in_the_log_and_in_the_error(caplog):
    faults = Faults()
    with serving() as server, lossy(server, faults) as client:
        client.echo(1)
        faults.is_silent = True
        with pytest.raises(CallTimeoutError, match="no sign of life for"):
            client.call("hold", timeout_s=1.0)
    assert "has given no sign of life" in caplog.text


def test_a_client_can_dial_in_its_own_way():
    with (
        Client("nowhere", dial=nobody, timeout_s=0.1) as client,
        pytest.raises(CallTimeoutError, match="Nobody listens"),
    ):
        client.echo()


def test_a_call_in_a_server_that_gives_it_up_may_have_run_in_part():
    with serving("in-process", probe := Probe()) as server, client_of(server) as client:
        future = client.futures.hold()
        assert probe.started.acquire(timeout=LONG_S)
        stopping = threading.Thread(target=server.stop, args=(0.0,))
        stopping.start()
        with pytest.raises(ServerStoppedError, match=r"`hold` of 'probe'.*in part"):
            future.result(LONG_S)
        stopping.join(LONG_S)


def test_a_reply_that_cannot_be_read_here_names_its_call():
    known, registry = Registry(), Registry()

    @known.register
    @dataclasses.dataclass
    class Point:
        x: int

    listener = listen("unix:", secret=SECRET, registry=known)
    server = Server(listeners=[listener], registry=known)
    server.bind("point", lambda: Point(1))
    with server, Client(server.address, secret=SECRET, registry=registry) as client:
        with pytest.raises(DecodeError, match=r"`point` of 'server'.*has run.*Point"):
            client.point()
        with pytest.raises(DecodeError, match=r"`point` of 'server'.*has run.*Point"):
            client.futures.point().result(LONG_S)


class HastyConnection(FaultyConnection):
    """Tells the server a shorter deadline than the caller's."""

    def send(self, kind, call_id, value, *, timeout_s):
        if kind == MessageKind.CALL and not value[0].startswith("~"):
            value = [*value[:3], 0.05]
        return self.inner.send(kind, call_id, value, timeout_s=timeout_s)


@pytest.mark.parametrize("error", [TimeoutError, CallCancelledError])
def test_a_handler_that_gives_up_at_the_deadline_has_overrun_it(error):
    class Patient:
        def give_up(self):
            served_call.current_call().wait_cancelled(LONG_S)
            raise error("too late")

        def fail_early(self):
            raise error("too early")

    def dial(left_s):
        inner = connect(server.address, secret=SECRET, timeout_s=left_s)
        return HastyConnection(inner, Faults())

    with (
        serving("unix", Patient()) as server,
        client_of(server, dial=dial) as client,
    ):
        with pytest.raises(CallTimeoutError, match=r"its handler gave up after 0\."):
            client.give_up()
        with pytest.raises(RemoteError, match="too early"):
            client.fail_early()
