"""Over gRPC nobody gets in without the secret, or makes others wait for it."""

import contextlib
import dataclasses
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from replicator.errors import (
    AuthenticationError,
    ConnectionLostError,
)
from replicator.rpc.security.authentication import (
    PRESSED_S,
    ClientHandshake,
)
from replicator.rpc.security.certificates import make_certificates
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.transports.between_hosts import grpc_stream
from replicator.rpc.transports.between_hosts.chunk_queues import CHUNK_BYTES
from replicator.rpc.transports.between_hosts.grpc_stream import connect_grpc
from tests.rpc.transports.between_hosts.grpc_ends import (
    CONNECT,
    Stranger,
    admitting,
    arguments,
    connected,
    dial,
    listening,
    relaying,
)
from tests.rpc.transports.ends import LONG_S, SECRET, SHORT_S, pass_on, wait_until

GARBAGE = {
    "noise": bytes(range(100, 164)),
    "our magic, and noise": b"RPLF" + bytes(range(100, 164)),
    "a header that lies": b"RPLF\x01\x00\x01\x00" + bytes(8) + b"\xff" * 20,
}


@pytest.fixture
def listener():
    with listening() as listener:
        yield listener


@pytest.fixture
def briefly(monkeypatch):
    """Make the handshake's patience short."""
    monkeypatch.setattr(grpc_stream, "HANDSHAKE_TIMEOUT_S", SHORT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls") / "program"
    make_certificates(folder)
    return folder


@contextlib.contextmanager
def accepting(listener, *, places):
    """Admit as a server does, so many at a time; yield a queue of who got in."""
    admitted = queue.SimpleQueue()
    free = threading.Semaphore(places)

    def admit(door):
        with contextlib.suppress(AuthenticationError):
            admitted.put(door())
        free.release()

    def accept():
        with contextlib.suppress(ConnectionLostError):
            while free.acquire():
                pool.submit(admit, listener.accept())

    with ThreadPoolExecutor(places + 1) as pool:
        pool.submit(accept)
        try:
            yield admitted
        finally:
            listener.close()
            free.release()


def test_another_secret_is_refused_and_both_ends_are_told(listener):
    with admitting(listener) as promise:
        with pytest.raises(AuthenticationError, match="refused this process"):
            dial(listener, secret=Secret.generate())
        with pytest.raises(AuthenticationError, match=r"client at 127.*did not prove"):
            promise.result(LONG_S)


def test_a_silent_client_is_given_up(listener, briefly):
    with Stranger(listener) as stranger, admitting(listener) as promise:
        with pytest.raises(AuthenticationError, match="silent at the handshake"):
            promise.result(LONG_S)
        assert stranger.receive() is None


def test_a_silent_server_is_given_up():
    released = threading.Event()

    def handle(requests, context):
        released.wait(LONG_S)
        return iter(())

    handler = grpc.method_handlers_generic_handler(
        "replicator.rpc.Connections",
        {"Connect": grpc.stream_stream_rpc_method_handler(handle)},
    )
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(ConnectionLostError, match="was silent at the handshake"):
            connect_grpc(f"grpc://127.0.0.1:{port}", **arguments(timeout_s=SHORT_S))
        released.set()
        server.stop(None).wait(LONG_S)


def test_silent_strangers_do_not_keep_others_out(briefly):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening())
        for _ in range(6):
            stack.enter_context(Stranger(listener))
        admitted = stack.enter_context(accepting(listener, places=4))
        client = dial(listener)
        stack.callback(client.close)
        assert pass_on(client, admitted.get(timeout=LONG_S), 1) == 1


def test_silent_strangers_have_less_time_while_others_wait(monkeypatch):
    """With the full patience for each, the six would take three times that."""
    monkeypatch.setattr(grpc_stream, "HANDSHAKE_TIMEOUT_S", LONG_S / 2)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening())
        strangers = [stack.enter_context(Stranger(listener)) for _ in range(6)]
        hello = ClientHandshake(SECRET, binding="grpc:1").hello()
        strangers[0].send(hello)  # needs no secret
        wait_until(lambda: listener._arrivals.qsize() == 6)
        admitted = stack.enter_context(accepting(listener, places=2))
        started_s = time.monotonic()
        stack.callback(dial(listener).close)
        stack.callback(admitted.get(timeout=LONG_S).close)
        assert time.monotonic() - started_s < LONG_S / 2


def test_who_is_slow_has_all_its_time_while_nobody_waits(listener, monkeypatch):
    monkeypatch.setattr(grpc_stream, "HANDSHAKE_TIMEOUT_S", LONG_S)
    with Stranger(listener) as slow, admitting(listener) as promise:
        with contextlib.suppress(TimeoutError):
            promise.result(2 * PRESSED_S)
        slow.prove()
        promise.result(LONG_S).close()


def test_connections_are_counted(listener, monkeypatch):
    monkeypatch.setattr(grpc_stream, "MAX_CONNECTIONS", 2)
    with (
        connected(listener),
        connected(listener),
        pytest.raises(ConnectionLostError, match="no more than 2 connections"),
    ):
        dial(listener)
    with connected(listener) as ends:  # there is room again
        assert pass_on(*ends, 1) == 1


@pytest.mark.parametrize("chunk", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_message_ends_the_connection(listener, chunk):
    with Stranger(listener) as stranger, admitting(listener) as promise:
        stranger.prove()
        with contextlib.closing(promise.result(LONG_S)) as server:
            stranger.send(chunk)
            with pytest.raises(
                ConnectionLostError, match="an invalid message, and was cut off"
            ):
                server.receive(timeout_s=LONG_S)
            assert stranger.receive() is None


def test_a_chunk_past_the_limit_is_not_taken(listener):
    with Stranger(listener) as stranger, admitting(listener) as promise:
        stranger.prove()
        with contextlib.closing(promise.result(LONG_S)) as server:
            stranger.send(bytes(CHUNK_BYTES + 1))
            with pytest.raises(ConnectionLostError):
                server.receive(timeout_s=LONG_S)
            assert stranger.receive() is None
            assert stranger.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_what_is_compressed_is_not_inflated(listener):
    """32 MB of zeros are 32 KB on the wire: less than a chunk may have."""
    with (
        Stranger(listener, compression=grpc.Compression.Gzip) as stranger,
        admitting(listener) as promise,
    ):
        stranger.prove()
        with contextlib.closing(promise.result(LONG_S)) as server:
            stranger.send(bytes(32 << 20))
            with pytest.raises(ConnectionLostError):
                server.receive(timeout_s=LONG_S)
            assert stranger.receive() is None


def test_metadata_past_the_limit_is_refused(listener):
    metadata = [("words", "x" * (64 << 10))]
    with health_of(listener) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_impostor_on_another_port_cannot_pass_a_clients_proof_on(listener):
    """It has the port of a server that died, and carries bytes to one that lives."""
    with listening() as dead, Stranger(listener) as relay:
        impostor = dead.address
        relay.port = int(impostor.rpartition(":")[2])  # what its victim believes
        with admitting(listener) as promise:
            with pytest.raises(AuthenticationError):
                relay.prove()
            with pytest.raises(AuthenticationError):
                promise.result(LONG_S)


def test_a_stranger_at_another_address_of_loopback_is_not_dialled_nor_believed(
    listener,
):
    """It has the port at ::1, and carries bytes both ways: the whole connection."""
    port = int(listener.address.rpartition(":")[2])
    with relaying("::1", port, to=("127.0.0.1", port)) as came:
        with admitting(listener) as promise:
            with pytest.raises(AuthenticationError):
                connect_grpc(f"grpc://[::1]:{port}", **arguments(timeout_s=LONG_S))
            with pytest.raises(AuthenticationError):
                promise.result(LONG_S)
        assert came
        came.clear()
        with admitting(listener) as promise:
            local = connect_grpc(
                f"grpc://localhost:{port}", **arguments(timeout_s=LONG_S)
            )
            with contextlib.closing(local), contextlib.closing(promise.result(LONG_S)):
                assert not came


# Health, and what else gRPC offers.


@contextlib.contextmanager
def health_of(listener):
    target = listener.address.removeprefix("grpc://")
    with grpc.insecure_channel(target) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def test_health_answers_though_nobody_accepts(listener):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(Stranger(listener))
        stub = stack.enter_context(health_of(listener))
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_knows_no_other_service(listener):
    with health_of(listener) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "method", ["/grpc.health.v1.Health/Watch", "/x/y", CONNECT[:-1]]
)
def test_no_other_method_is_there(listener, method):
    target = listener.address.removeprefix("grpc://")
    with (
        grpc.insecure_channel(target) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(method)(b"", timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# TLS.


@pytest.fixture(scope="module")
def server_tls(folder):
    return Tls.in_folder(folder, "server")


@pytest.fixture(scope="module")
def client_tls(folder):
    return Tls.in_folder(folder, "client")


@pytest.fixture
def tls_listener(server_tls):
    with listening(tls=server_tls) as listener:
        yield listener


def test_tls_carries_messages(tls_listener, client_tls):
    with connected(tls_listener, tls=client_tls) as ends:
        value = np.arange(1_000_000)
        np.testing.assert_array_equal(pass_on(*ends, value), value)


def test_over_tls_the_secret_is_asked_for_as_well(tls_listener, client_tls):
    with (
        admitting(tls_listener),
        pytest.raises(AuthenticationError, match="refused this process"),
    ):
        dial(tls_listener, tls=client_tls, secret=Secret.generate())


def test_a_server_of_another_program_is_refused(client_tls, tmp_path):
    make_certificates(tmp_path / "other")
    with (
        listening(tls=Tls.in_folder(tmp_path / "other", "server")) as listener,
        pytest.raises(AuthenticationError, match="by its certificate"),
    ):
        dial(listener, tls=client_tls)


def test_a_server_whose_certificate_names_another_host_is_refused(tmp_path):
    make_certificates(tmp_path / "c", hosts=["node-1"])
    with (
        listening(tls=Tls.in_folder(tmp_path / "c", "server")) as listener,
        pytest.raises(AuthenticationError, match="name this host"),
    ):
        dial(listener, tls=Tls.in_folder(tmp_path / "c", "client"))


@pytest.mark.parametrize("whose", ["a server's", "another program's", "none"])
def test_a_client_without_a_clients_certificate_is_refused(
    tls_listener, server_tls, tmp_path, whose
):
    make_certificates(tmp_path / "other")
    other = Tls.in_folder(tmp_path / "other", "client")
    other = dataclasses.replace(other, ca=server_tls.ca)
    tls = {"a server's": server_tls, "another program's": other, "none": None}[whose]
    with pytest.raises(ConnectionLostError):
        dial(tls_listener, tls=tls)
