"""Who does not prove itself in time gets nothing, and holds up nobody."""

import contextlib
import gc
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicator.errors import AuthenticationError, ConnectionLostError
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.security.authentication import (
    HANDSHAKE_TIMEOUT_S,
    MESSAGE_BYTES,
    ClientHandshake,
    ServerHandshake,
)
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports import connect as connecting
from replicator.rpc.transports.connect import connect
from replicator.rpc.transports.same_host import unix_handshake
from tests.rpc.transports.ends import (
    LIMITS,
    LONG_S,
    SECRET,
    TRANSPORTS,
    connected,
    listening,
    pass_on,
    wait_until,
)

OTHER = Secret.generate()
SILENCE_S = 0.2


@pytest.fixture
def listener():
    with listening(TRANSPORTS["unix"]) as listener:
        yield listener


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setattr(unix_handshake, "HANDSHAKE_TIMEOUT_S", SILENCE_S)


@contextlib.contextmanager
def stranger(listener):
    """Connect without a handshake; yield the socket and the server's handshake."""
    with (
        ThreadPoolExecutor(2) as pool,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
    ):
        sock.settimeout(LONG_S)
        sock.connect(listener.address.removeprefix("unix:"))
        yield sock, pool.submit(listener.accept())


def proved(sock, secret=SECRET):
    """Do the client's half of the handshake, up to what is shared."""
    handshake = ClientHandshake(secret, binding="unix")
    sock.sendall(handshake.hello())
    sock.sendall(handshake.answer(sock.recv(MESSAGE_BYTES)))
    handshake.finish(sock.recv(MESSAGE_BYTES))


@contextlib.contextmanager
def impostor(tmp_path, talk):
    """Listen as a server would, but `talk` to the first client."""
    tmp_path.chmod(0o700)
    path = f"{tmp_path}/socket"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
        ThreadPoolExecutor(1) as pool,
    ):
        sock.bind(path)
        sock.listen(1)

        def serve():
            client, _ = sock.accept()
            with client:
                client.settimeout(LONG_S)
                talk(client)

        done = pool.submit(serve)
        yield f"unix:{path}"
        done.result(LONG_S)


def wait_for_end(client):
    while client.recv(4096):
        pass


# At the server.


def test_the_bound_is_two_seconds():
    assert HANDSHAKE_TIMEOUT_S == 2
    assert unix_handshake.HANDSHAKE_TIMEOUT_S == 2


def test_a_silent_client_is_given_up_in_time(listener, short_patience):
    with stranger(listener) as (sock, handshake):
        start = time.monotonic()
        error = handshake.exception(LONG_S)
        assert time.monotonic() - start < LONG_S / 2
        assert sock.recv(1) == b""
    assert isinstance(error, AuthenticationError)
    assert listener.address in str(error)
    assert f"process {os.getpid()}" in str(error)


def test_a_client_that_drips_is_given_up_in_time(listener, short_patience):
    with stranger(listener) as (sock, handshake):
        sent = 0
        with contextlib.suppress(OSError):
            while not handshake.done():
                sock.sendall(b"r")
                sent += 1
                time.sleep(0.05)
        assert isinstance(handshake.exception(LONG_S), AuthenticationError)
        assert sent < MESSAGE_BYTES


def test_a_client_that_stops_halfway_is_given_up_in_time(listener, monkeypatch):
    # Long enough to come halfway on a busy machine.
    monkeypatch.setattr(unix_handshake, "HANDSHAKE_TIMEOUT_S", 1.0)
    with stranger(listener) as (sock, handshake):
        sock.sendall(ClientHandshake(SECRET, binding="unix").hello())
        sock.recv(MESSAGE_BYTES)
        assert isinstance(handshake.exception(LONG_S), AuthenticationError)
    with stranger(listener) as (sock, handshake):
        proved(sock)
        assert isinstance(handshake.exception(LONG_S), AuthenticationError)


def test_others_are_served_while_a_stranger_is_silent(listener, monkeypatch):
    monkeypatch.setattr(unix_handshake, "HANDSHAKE_TIMEOUT_S", LONG_S)
    with stranger(listener) as (sock, handshake):
        with connected(listener) as ends:
            assert pass_on(*ends, "hello") == "hello"
            assert not handshake.done()
        sock.close()
        assert isinstance(handshake.exception(LONG_S), ConnectionLostError)


@pytest.mark.parametrize(
    "data", [b"x" * MESSAGE_BYTES, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2]
)
def test_a_stranger_who_speaks_otherwise_is_refused(listener, data):
    with stranger(listener) as (sock, handshake):
        sock.sendall(data)
        assert isinstance(handshake.exception(LONG_S), AuthenticationError)
        assert len(sock.recv(4096)) == MESSAGE_BYTES  # why
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_a_wrong_secret_is_refused_at_both_ends(listener):
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(lambda: listener.accept()())
        with pytest.raises(AuthenticationError, match=listener.address) as caught:
            connect(listener.address, secret=OTHER, timeout_s=LONG_S)
        assert "secret" in str(caught.value)
        assert isinstance(served.exception(LONG_S), AuthenticationError)


def test_nothing_is_read_of_who_did_not_prove_itself(listener):
    with stranger(listener) as (sock, handshake):
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            sock.sendall(b"x" * (1 << 24))
        assert isinstance(handshake.exception(LONG_S), AuthenticationError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(listener, monkeypatch):
    monkeypatch.setattr(unix_handshake.os, "geteuid", lambda: 12345)
    with stranger(listener) as (_, handshake):
        error = handshake.exception(LONG_S)
    assert isinstance(error, AuthenticationError)
    assert "got user 0" in str(error)


# What is shared.


def test_descriptors_before_the_proof_are_closed(listener):
    reader, writer = os.pipe()
    with stranger(listener) as (sock, handshake):
        hello = ClientHandshake(SECRET, binding="unix").hello()
        socket.send_fds(sock, [hello], [writer])
        os.close(writer)
        assert os.read(reader, 1) == b""  # nobody has it
        sock.close()
        handshake.exception(LONG_S)
    os.close(reader)


def test_a_client_may_do_without_shared_memory(listener):
    with stranger(listener) as (sock, handshake):
        proved(sock)
        sock.sendall(struct.pack("<Q", 0))
        assert sock.recv(8) == bytes(8)
        handshake.result(LONG_S).close()
    with connected(listener, MessageLimits(shared_bytes=0)) as ends:
        assert pass_on(*ends, np.ones(100_000)).sum() == 100_000


@pytest.mark.skipif(not unix_handshake.IS_AVAILABLE, reason="no shared memory here")
def test_another_kind_of_channel_is_refused(listener):
    descriptor, _ = unix_handshake.make_sealed(unix_handshake.BOARD_BYTES)
    pair = socket.socketpair()
    for channel in (pair[0].fileno(), 0, descriptor):
        with stranger(listener) as (sock, handshake):
            proved(sock)
            offer = struct.pack("<Q", 1 << 20)
            socket.send_fds(sock, [offer], [channel, descriptor])
            error = handshake.exception(LONG_S)
        assert isinstance(error, ConnectionLostError)
        assert "channel" in str(error)
    for end in (*pair, descriptor):
        os.close(end if isinstance(end, int) else end.detach())


@pytest.mark.skipif(not unix_handshake.IS_AVAILABLE, reason="no shared memory here")
def test_a_board_that_may_shrink_is_refused(listener):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("board", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, unix_handshake.BOARD_BYTES)
    with stranger(listener) as (sock, handshake), ours, theirs:
        proved(sock)
        offer = struct.pack("<Q", 1 << 20)
        socket.send_fds(sock, [offer], [theirs.fileno(), descriptor])
        os.close(descriptor)
        error = handshake.exception(LONG_S)
    assert isinstance(error, ConnectionLostError)
    assert "sealed" in str(error)


# At the client.


def test_a_silent_server_is_given_up_in_time(tmp_path, short_patience):
    with impostor(tmp_path, wait_for_end) as address:
        start = time.monotonic()
        with pytest.raises(ConnectionLostError, match="socket"):
            connect(address, secret=SECRET, timeout_s=LONG_S)
        assert time.monotonic() - start < LONG_S / 2


def test_the_callers_time_bounds_the_handshake(tmp_path, monkeypatch):
    for module in (connecting, unix_handshake):
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", LONG_S)
    with impostor(tmp_path, wait_for_end) as address:
        start = time.monotonic()
        with pytest.raises(ConnectionLostError):
            connect(address, secret=SECRET, timeout_s=0.1)
        assert time.monotonic() - start < LONG_S / 2


def test_a_server_without_the_secret_is_refused(tmp_path):
    def talk(client):
        handshake = ServerHandshake(OTHER)
        client.sendall(handshake.challenge(client.recv(MESSAGE_BYTES)))
        client.recv(MESSAGE_BYTES)
        client.sendall(os.urandom(MESSAGE_BYTES))

    with (
        impostor(tmp_path, talk) as address,
        pytest.raises(AuthenticationError, match="secret"),
    ):
        connect(address, secret=SECRET, timeout_s=LONG_S)


def test_a_server_that_leaves_is_told_as_such(tmp_path):
    with (
        impostor(tmp_path, lambda client: None) as address,
        pytest.raises(ConnectionLostError, match="socket"),
    ):
        connect(address, secret=SECRET, timeout_s=LONG_S)


def test_a_server_that_accepts_nobody_is_given_up_in_time(tmp_path):
    tmp_path.chmod(0o700)
    path = f"{tmp_path}/socket"
    with contextlib.ExitStack() as stack:
        for sock in [socket.socket(socket.AF_UNIX) for _ in range(3)]:
            stack.enter_context(sock)
            if not os.path.exists(path):
                sock.bind(path)
                sock.listen(0)
                continue
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(path)
        start = time.monotonic()
        with pytest.raises(ConnectionLostError, match="accepted nobody"):
            connect(f"unix:{path}", secret=SECRET, timeout_s=0.1)
        assert time.monotonic() - start < LONG_S / 2


def test_failed_handshakes_leave_nothing_open(listener):
    if not os.path.exists("/proc/self/fd"):
        return
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(lambda: listener.accept()())
            with pytest.raises(AuthenticationError):
                connect(listener.address, secret=OTHER, limits=LIMITS, timeout_s=LONG_S)
            served.exception(LONG_S)
    gc.collect()
    # What other tests have left may close meanwhile.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
