"""Attacks of who does not know the secret: to get in, and to be taken for a server."""

import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.rpc_attack.attack import LONG_S, hold
from benchmarks.rpc_attack.streams import Stream, relaying
from benchmarks.rpc_attack.target import (
    Target,
    is_closed,
    private_folder,
    read_message,
)
from replicator.errors import AuthenticationError, RpcError
from replicator.rpc.security.authentication import (
    ANSWER_BYTES,
    HELLO_BYTES,
    ClientHandshake,
)
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.connect import connect

_WELCOME = b"rpc-ok"
_TRIES = 50


def _opens(address: str, secret: Secret) -> bool:
    try:
        connect(address, secret=secret, timeout_s=LONG_S).close()
    except AuthenticationError:
        return False
    return True


def wrong_secret(target: Target) -> None:
    """Guess."""
    for address in target.addresses:
        for _ in range(_TRIES):
            hold(not _opens(address, Secret.generate()), f"a guess opens {address}")


def replay_on_the_socket(target: Target) -> None:
    """Replay the messages of a client of the program."""
    handshake = ClientHandshake(target.secret, binding="unix")
    hello = handshake.hello()
    with target.raw() as raw:
        raw.sendall(hello)
        answer = handshake.answer(read_message(raw))
        raw.sendall(answer)
        handshake.finish(read_message(raw))
    with target.raw() as raw:
        raw.sendall(hello)
        read_message(raw)
        raw.sendall(answer)
        hold(not read_message(raw).startswith(_WELCOME), "a recording opens it")


def replay_over_grpc(target: Target) -> None:
    """The same over gRPC."""
    handshake = ClientHandshake(target.secret, binding=target.grpc_binding)
    hello = handshake.hello()
    with Stream(target.port) as stream:
        stream.send(hello)
        answer = handshake.answer(stream.receive())
        stream.send(answer)
        handshake.finish(stream.receive())
    with Stream(target.port) as stream:
        stream.send(hello)
        stream.receive()
        stream.send(answer)
        hold(not stream.receive().startswith(_WELCOME), "a recording opens it")


def reflection(target: Target) -> None:
    """Send the server its own words back."""
    hello = ClientHandshake(Secret.generate()).hello()
    with target.raw() as raw:
        raw.sendall(hello)
        raw.sendall(read_message(raw))
        hold(not read_message(raw).startswith(_WELCOME), "its own words open it")


def reflection_of_another_server(target: Target) -> None:
    """Let one connection answer the challenge of another."""
    with target.raw() as one, target.raw() as other:
        for raw in (one, other):
            raw.sendall(ClientHandshake(Secret.generate()).hello())
        challenges = [read_message(raw) for raw in (one, other)]
        for raw, words in zip((one, other), reversed(challenges), strict=True):
            raw.sendall(words)
            hold(not read_message(raw).startswith(_WELCOME), "an echo opens it")


def downgrade(target: Target) -> None:
    """Claim to speak an older version, or none."""
    for version in (b"\0\0", b"\xff\xff"):
        hello = ClientHandshake(target.secret, binding="unix").hello()
        with target.raw() as raw:
            raw.sendall(hello[:6] + version + hello[8:])
            hold(read_message(raw).startswith(b"rpc-no"), "another version is spoken")
    with target.raw() as raw:
        raw.sendall(bytes(HELLO_BYTES))
        with contextlib.suppress(BrokenPipeError):  # it may have refused the first
            raw.sendall(bytes(ANSWER_BYTES))
        hold(not read_message(raw).startswith(_WELCOME), "no handshake is needed")


def proof_of_another_transport(target: Target) -> None:
    """Carry a proof from the socket to the port, or from another port."""
    for binding in ("unix", "grpc:", "grpc-tls", f"grpc::{target.port}", "grpc:1:1"):
        handshake = ClientHandshake(target.secret, binding=binding)
        with Stream(target.port) as stream:
            stream.send(handshake.hello())
            stream.send(handshake.answer(stream.receive()))
            words = stream.receive()
        hold(not words.startswith(_WELCOME), f"a proof for {binding} opens the port")


def changed_bits(target: Target) -> None:
    """Change one bit of each message of a true handshake."""
    for place in range(0, HELLO_BYTES * 8, 7):
        handshake = ClientHandshake(target.secret, binding="unix")
        for changed in (0, 1):
            with target.raw() as raw:
                words = handshake.hello()
                raw.sendall(_flipped(words, place) if changed == 0 else words)
                challenge = read_message(raw)
                if not challenge.startswith(b"rpc-ch"):
                    continue
                answer = handshake.answer(challenge)
                with contextlib.suppress(OSError):
                    raw.sendall(_flipped(answer, place) if changed else answer)
                opened = read_message(raw).startswith(_WELCOME)
                hold(not opened, f"bit {place} of message {changed} may be any")


def _flipped(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def relay_at_another_loopback(target: Target) -> None:
    """Listen at ::1 on the server's port, and carry on what a client says there."""
    here = ("::1", target.port)
    with relaying(here, to=("127.0.0.1", target.port)) as came:
        hold(not _opens(f"grpc://[::1]:{target.port}", target.secret), "it is relayed")
        hold(came, "the relay was not tried")
        came.clear()
        with target.client(f"grpc://localhost:{target.port}") as client:
            hold(client.echo(1) == 1, "localhost is not served")
        hold(not came, "a client of localhost went to the stranger")


def relay_at_another_port(target: Target) -> None:
    """The same at another port, as of a server that died."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with relaying(("127.0.0.1", port), to=("127.0.0.1", target.port)):
        hold(not _opens(f"grpc://127.0.0.1:{port}", target.secret), "it is relayed")


def server_without_the_secret(target: Target) -> None:
    """Take the place of a server, in a folder that a client would trust."""
    path = private_folder() / "socket"
    with socket.socket(socket.AF_UNIX) as sock, ThreadPoolExecutor(1) as pool:
        sock.bind(str(path))
        sock.listen(1)

        def serve() -> None:
            with sock.accept()[0] as client, contextlib.suppress(OSError):
                client.sendall(read_message(client))
                client.sendall(read_message(client))
                is_closed(client)

        served = pool.submit(serve)
        with contextlib.suppress(RpcError):
            connect(f"unix:{path}", secret=target.secret, timeout_s=LONG_S).close()
            hold(False, "a client takes it for its server")
        served.result(LONG_S)


def folder_that_others_enter(target: Target) -> None:
    """Have a client use a socket in a folder that is open to all."""
    folder = private_folder()
    os.symlink(target.path, folder / "socket")
    folder.chmod(0o777)
    hold(not _opens(f"unix:{folder}/socket", target.secret), "it is used")


def grows_by_nothing(target: Target) -> None:
    """Leave descriptors or threads behind by refused handshakes."""
    count = lambda: len(os.listdir(f"/proc/{target.pid}/fd"))  # noqa: E731
    for address in target.addresses:
        _opens(address, Secret.generate())
    before = count()
    for _ in range(_TRIES):
        _opens(target.unix, Secret.generate())
        with target.raw() as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_BYTES))
            is_closed(raw)
    hold(count() <= before + 3, f"{count() - before} descriptors are left")


ATTACKS: dict[str, Callable[[Target], None]] = {
    attack.__name__: attack
    for attack in (
        wrong_secret,
        replay_on_the_socket,
        replay_over_grpc,
        reflection,
        reflection_of_another_server,
        downgrade,
        proof_of_another_transport,
        changed_bits,
        relay_at_another_loopback,
        relay_at_another_port,
        server_without_the_secret,
        folder_that_others_enter,
        grows_by_nothing,
    )
}
