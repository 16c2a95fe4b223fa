"""Attacks on the meeting while process 0 waits for process 1."""

import contextlib
import json
import socket
import time

from benchmarks.join_attack.group import FLOOD, Group, ask, flood
from benchmarks.rpc_attack.attack import LONG_S, hold
from replicator.distributed.meeting.client import wait_for_all
from replicator.distributed.meeting.members import Hello
from replicator.distributed.meeting.server import BINDING
from replicator.errors import AuthenticationError, DistributedError
from replicator.rpc import Secret
from replicator.rpc.security.authentication import MESSAGE_BYTES, ClientHandshake


def _hello(group: Group) -> bytes:
    return Hello(
        process_id=1,
        num_processes=2,
        host="stranger",
        patience_s=60.0,
        clock_s=time.time(),
        has_tls=group.has_tls,
    ).to_line()


def prove(group: Group, secret: Secret, binding: str) -> bytes:
    """Make a client's handshake, and send a hello; return the answer to the hello."""
    handshake = ClientHandshake(secret, binding=binding)
    with socket.create_connection(group.place, LONG_S) as connection:
        connection.settimeout(1.0)
        with contextlib.suppress(OSError, AuthenticationError):
            connection.sendall(handshake.hello())
            answer = handshake.answer(connection.recv(MESSAGE_BYTES))
            connection.sendall(answer + _hello(group))
            handshake.finish(connection.recv(MESSAGE_BYTES))
            return connection.recv(1 << 16)
    return b""


def greet(group: Group) -> bytes:
    """Send a hello without a proof; return the answer."""
    return ask(group.place, _hello(group))


def _without_a_secret(group: Group) -> None:
    group.start_0()
    hold(b"go" not in greet(group), "it was let in")


def _with_another_runs(group: Group) -> None:
    group.start_0()
    try:
        hosts = wait_for_all(
            group.cluster, bind_host=None, timeout_s=3.0, secret=group.others
        )
    except (DistributedError, AuthenticationError) as error:
        hold("its secret is another one" in str(error), f"another error: {error}")
    else:
        hold(False, f"it met {hosts}")


def _with_a_proof_for_something_else(group: Group) -> None:
    group.start_0()
    hold(not prove(group, group.secret, ""), "a proof for a server opens the meeting")


def _by_guesses(group: Group) -> None:
    group.start_0()
    for _ in range(300):
        hold(not prove(group, Secret.generate(), BINDING), "a guess was right")


def _by_reflecting(group: Group) -> None:
    group.start_0()
    with socket.create_connection(group.place, LONG_S) as connection:
        connection.settimeout(1.0)
        connection.sendall(ClientHandshake(group.others, binding=BINDING).hello())
        challenge = connection.recv(MESSAGE_BYTES)
        with contextlib.suppress(OSError):
            connection.sendall(challenge + _hello(group))
            hold(b"go" not in connection.recv(1 << 16), "its own challenge let it in")


def _by_replaying(group: Group) -> None:
    """Send again the messages by which a member proved that it knows the secret."""
    group.start_0()
    member = ClientHandshake(group.secret, binding=BINDING)
    with socket.create_connection(group.place, LONG_S) as connection:
        hello = member.hello()
        connection.sendall(hello)
        answer = member.answer(connection.recv(MESSAGE_BYTES))
        connection.sendall(answer)
        member.finish(connection.recv(MESSAGE_BYTES))
    hold(
        b"go" not in ask(group.place, hello, answer + _hello(group)), "it lets in again"
    )


def _by_silence(group: Group) -> None:
    group.start_0()
    with flood(group.place, FLOOD):
        group.joined_s()


def _by_dripping(group: Group) -> None:
    group.start_0()
    with contextlib.ExitStack() as stack:
        dripping = [
            stack.enter_context(socket.create_connection(group.place, LONG_S))
            for _ in range(60)
        ]
        for connection in dripping:
            connection.sendall(b"rpc-h")
        group.joined_s()


def _by_junk(group: Group) -> None:
    group.start_0()
    for junk in (b"GET / HTTP/1.0\r\n\r\n", b"\x80\x04." * 40, b"{" * 4096, b"\0" * 39):
        ask(group.place, junk, patience_s=0.05)


def _by_a_false_process_0(group: Group) -> None:
    """Listen before process 0 does, and send process 1 a verdict without a proof."""
    with socket.create_server(group.place) as listener:
        group.start(1)
        connection, _ = listener.accept()
        with connection:
            connection.recv(MESSAGE_BYTES)
            connection.sendall(json.dumps({"go": ["here", "there"]}).encode() + b"\n")


ATTACKS = {
    f"meeting{attack.__name__}": attack
    for attack in (
        _without_a_secret,
        _with_another_runs,
        _with_a_proof_for_something_else,
        _by_guesses,
        _by_reflecting,
        _by_replaying,
        _by_silence,
        _by_dripping,
        _by_junk,
        _by_a_false_process_0,
    )
}
