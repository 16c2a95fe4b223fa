"""Rules for network addresses: those that need TLS, and ports that are free."""

import errno
import functools
import ipaddress
import logging
import socket
import urllib.parse

from replicator.errors import (
    AddressInUseError,
    ArgumentError,
    AuthenticationError,
    ConnectionLostError,
)
from replicator.rpc.transports.addresses import GrpcAddress, parse
from replicator.rpc.transports.port_owner import owner_of_port

_logger = logging.getLogger("replicator.rpc")


def loopback(host: str) -> str:
    """Return the address that only this host can reach under a name; else "".

    `localhost` is 127.0.0.1, for clients and servers: were it ::1 for one of them, a
    stranger could listen there.

    >>> loopback("localhost"), loopback("10.0.0.7")
    ('127.0.0.1', '')
    """
    try:
        address = ipaddress.ip_address(
            "127.0.0.1" if host.lower() == "localhost" else host
        )
    except ValueError:
        return ""
    return str(address) if address.is_loopback else ""


def permitted_place(address: str, *, has_tls: bool, insecure: bool) -> GrpcAddress:
    """Return the place of an address that is safe to use, or was explicitly allowed.

    Args:
      address: Address to listen at, or to connect to: `grpc://host:port`.
      has_tls: Whether the connection will be encrypted and both ends proved.
      insecure: Whether the user asked for neither; logged, once for each address.

    Raises:
      ArgumentError: It is not an address of gRPC; or beyond loopback, without TLS.

    >>> permitted_place("grpc://localhost:80", has_tls=False, insecure=False)
    GrpcAddress(host='127.0.0.1', port=80)
    >>> permitted_place("grpc://10.0.0.7:80", has_tls=False, insecure=False)
    Traceback (most recent call last):
    ...
    replicator.errors.ArgumentError: `tls` must be given for an address beyond this
    host, got None for grpc://10.0.0.7:80. ...
    """
    place = parse(address)
    if not isinstance(place, GrpcAddress):
        raise ArgumentError(
            f"`address` must be grpc://host:port, got {address!r}. Use another "
            "transport for it."
        )
    # TLS proves both ends wherever they are; the name of the host is checked by it.
    if has_tls:
        return place
    if host := loopback(place.host):
        return GrpcAddress(host, place.port)
    if not insecure:
        raise ArgumentError(
            f"`tls` must be given for an address beyond this host, got None for "
            f"{address}. Make certificates with `replicator certificates DIR`, or pass "
            "`insecure=True` if all who can reach the network may read and change "
            "what is sent."
        )
    _warn_once(address)
    return place


def unreachable(address: str, failure: Exception | None) -> Exception:
    """Return the error for a stream that ended before the handshake did.

    Args:
      address: Address of the server.
      failure: Error of gRPC, if there was one.

    >>> unreachable("grpc://host:80", None)
    ConnectionLostError('No server answers at grpc://host:80: the stream ended.')
    """
    text = "the stream ended" if failure is None else str(failure)
    # BoringSSL's text for the chain, and gRPC's own for the name of the host.
    if "CERTIFICATE_VERIFY_FAILED" in text or "Verification Check failed" in text:
        return AuthenticationError(
            f"The server at {address} is not of this program, by its certificate: "
            f"{text}. Make certificates that name this host."
        )
    return ConnectionLostError(f"No server answers at {address}: {text}.")


def readable(peer: str) -> str:
    """Return a peer's address of gRPC as people write it.

    >>> readable("ipv6:%5B::1%5D:80")
    '[::1]:80'
    """
    return urllib.parse.unquote(peer.partition(":")[2])


def check_free(host: str, port: int, *, address: str) -> None:
    """Check that a server could listen there now.

    Args:
      host: A name or address of this host.
      port: Number of the port; 0 for any.
      address: Both, for the error.

    Raises:
      ArgumentError: The address is not this host's.
      AddressInUseError: Another listens there.
    """
    # Asked before gRPC is, whose error names neither the reason nor the owner. Another
    # process may still come first: then gRPC fails, and `in_use` is raised.
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As gRPC does: remains of old connections do not hinder it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            raise in_use(port, address=address) from None
        raise ArgumentError(
            f"`address` must be one of this host, got {address} ({failure}). Use "
            "grpc://127.0.0.1:0 for calls on this host."
        ) from None


def in_use(port: int, *, address: str) -> AddressInUseError:
    """Return the error for a port that another has; it names the owner if it can."""
    owner = owner_of_port(port)
    who = "another process" if owner is None else f"process {owner}"
    return AddressInUseError(
        f"{address} is in use: {who} listens there. Stop it, or use port 0, which "
        "takes a free one."
    )


@functools.cache
def _warn_once(address: str) -> None:
    _logger.warning(
        "%s is used without TLS (`insecure=True`): all who can reach the network can "
        "read and change what is sent.",
        address,
    )
