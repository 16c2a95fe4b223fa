"""Attacks on a server that other hosts reach, by wrong certificates and without."""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.rpc_attack.attack import LONG_S, hold
from benchmarks.rpc_attack.target import Target, private_folder
from replicator.errors import ArgumentError, RpcError
from replicator.rpc.security.certificates import make_certificates
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.transports.connect import connect


@contextlib.contextmanager
def _served() -> Iterator[tuple[Target, Path]]:
    folder = private_folder() / "program"
    make_certificates(folder, hosts=["localhost", "127.0.0.1"])
    with Target(addresses="grpc://localhost:0", tls=str(folder)) as target:
        yield target, folder


def _gets_in(target: Target, tls: Tls | None, secret: Secret, host: str) -> bool:
    try:
        connect(
            f"grpc://{host}:{target.port}", secret=secret, tls=tls, timeout_s=LONG_S / 5
        ).close()
    except (RpcError, ArgumentError):
        return False
    return True


def _is_held(change: Callable[[Tls, Path], Tls | None], *, host: str = "localhost"):
    with _served() as (target, folder):
        right = Tls.in_folder(folder, "client")
        inside = _gets_in(target, right, target.secret, "localhost")
        hold(inside, "nobody gets in")
        tls = change(right, folder)
        hold(not _gets_in(target, tls, target.secret, host), "it gets in")


def no_certificate() -> None:
    """Come without TLS, with the right secret."""
    _is_held(lambda tls, folder: None)


def certificate_of_a_server() -> None:
    """Come as a client with a server's certificate."""
    _is_held(lambda tls, folder: Tls.in_folder(folder, "server"))


def certificate_of_another_program() -> None:
    """Come with a certificate of another authority, and trust this one."""

    def of_another(tls: Tls, folder: Path) -> Tls:
        other = private_folder() / "other"
        make_certificates(other, hosts=["localhost"])
        return dataclasses.replace(Tls.in_folder(other, "client"), ca=tls.ca)

    _is_held(of_another)


def server_of_another_program() -> None:
    """Be dialled by who trusts another authority."""

    def trusting(tls: Tls, folder: Path) -> Tls:
        other = private_folder() / "other"
        make_certificates(other, hosts=["localhost"])
        return dataclasses.replace(tls, ca=other / "ca.pem")

    _is_held(trusting)


def name_of_another_host() -> None:
    """Be dialled under a name that the certificate does not bear."""
    _is_held(lambda tls, folder: tls, host="127.0.0.2")


def certificate_without_the_secret() -> None:
    """Come with the right certificate alone."""
    with _served() as (target, folder):
        tls = Tls.in_folder(folder, "client")
        opened = _gets_in(target, tls, Secret.generate(), "localhost")
        hold(not opened, "a certificate alone gets in")


def bytes_without_tls() -> None:
    """Send plain HTTP/2, and noise, to the port."""
    with _served() as (target, folder):
        for words in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"\0" * 4096):
            place = ("127.0.0.1", target.port)
            with socket.create_connection(place, LONG_S) as raw:
                raw.sendall(words)
                raw.settimeout(LONG_S)
                with contextlib.suppress(ConnectionError):
                    hold(b"rpc" not in raw.recv(4096), "it speaks without TLS")
        right = Tls.in_folder(folder, "client")
        hold(_gets_in(target, right, target.secret, "localhost"), "it serves no more")


def keys_that_others_can_read() -> None:
    """Have a client use a private key that was open to all."""

    def opened(tls: Tls, folder: Path) -> Tls:
        tls.key.chmod(0o644)
        return tls

    _is_held(opened)


ATTACKS: dict[str, Callable[[], None]] = {
    attack.__name__: attack
    for attack in (
        no_certificate,
        certificate_of_a_server,
        certificate_of_another_program,
        server_of_another_program,
        name_of_another_host,
        certificate_without_the_secret,
        bytes_without_tls,
        keys_that_others_can_read,
    )
}
