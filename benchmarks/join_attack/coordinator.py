"""Attacks on JAX's coordination service, which listens as long as the run lives."""

import contextlib
import os
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.join_attack.group import FLOOD, ROOT, Group, ask, flood
from benchmarks.rpc_attack.attack import LONG_S, hold
from replicator.rpc import Secret
from replicator.rpc.security.certificates import make_member_certificate

# The client's first frames in HTTP/2 (RFC 9113, 3.4): the preface, and empty settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# What JAX itself does to be process 1 of such a group.
_JAX = """
import sys, jax
where, *files = sys.argv[1:]
named = ("mtls_ca_file", "mtls_cert_file", "mtls_key_file", "mtls_peer_uri_prefix")
jax.distributed.initialize(
    where, 2, 1, initialization_timeout=3, **dict(zip(named, files))
)
print("joined")
"""


@contextlib.contextmanager
def _certificate(secret: Secret) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        files = make_member_certificate(secret, Path(folder))
        yield [str(files.ca), str(files.certificate), str(files.key)]


def _settings(group: Group, secret: Secret | None) -> bytes:
    """Return the answer of the service to a client's first frames."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.ExitStack() as stack:
        if secret is not None:
            _, certificate, key = stack.enter_context(_certificate(secret))
            context.load_cert_chain(certificate, key)
        stack.enter_context(contextlib.suppress(OSError))
        raw = stack.enter_context(socket.create_connection(group.place, LONG_S))
        with context.wrap_socket(raw) as connection:
            connection.sendall(_PREFACE)
            return connection.recv(1 << 16)
    return b""


def _is_member(group: Group, files: list[str]) -> bool:
    """Return whether JAX itself gets in, with these files."""
    prefix = ["replicator://group/"] if files else []
    done = subprocess.run(
        [group.python, "-c", _JAX, group.cluster.coordinator, *files, *prefix],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    return "joined" in done.stdout


def _by_a_member(group: Group) -> None:
    """No attack: a member is answered, or the attacks would show nothing."""
    group.joined_s()
    hold(_settings(group, group.secret), "it does not answer its own")


def _without_tls(group: Group) -> None:
    group.joined_s()
    hold(not ask(group.place, _PREFACE), "it answers without TLS")


def _without_a_certificate(group: Group) -> None:
    group.joined_s()
    hold(not _settings(group, None), "it answers without a certificate")


def _with_another_runs(group: Group) -> None:
    group.joined_s()
    hold(not _settings(group, group.others), "it answers another run")


def _by_jax_without_a_certificate(group: Group) -> None:
    group.joined_s()
    hold(not _is_member(group, []), "JAX got in without a certificate")


def _by_jax_with_another_runs(group: Group) -> None:
    group.joined_s()
    with _certificate(group.others) as files:
        hold(not _is_member(group, files), "JAX got in with another run's")


def _by_silence(group: Group) -> None:
    group.joined_s()
    with flood(group.place, FLOOD):
        group.still_talks()


def _by_silence_while_it_starts(group: Group) -> None:
    group.start_0()
    with flood(group.place, FLOOD, until_s=0.5):
        group.joined_s()


ATTACKS = {
    f"coordinator{attack.__name__}": attack
    for attack in (
        _by_a_member,
        _without_tls,
        _without_a_certificate,
        _with_another_runs,
        _by_jax_without_a_certificate,
        _by_jax_with_another_runs,
        _by_silence,
        _by_silence_while_it_starts,
    )
}
