"""Connect to an address, or listen at one: the transport follows from it."""

import math
import os
import shutil
import socket
import struct
import time
from typing import Any

from replicator.errors import (
    ArgumentError,
    ConnectionLostError,
)
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import DEFAULT_REGISTRY, Registry
from replicator.rpc.protocols import Connection, Listener
from replicator.rpc.security.authentication import HANDSHAKE_TIMEOUT_S
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.transports import addresses
from replicator.rpc.transports.in_process import (
    InProcessListener,
    connect_in_process,
    is_in_process,
)
from replicator.rpc.transports.payloads import Encoding
from replicator.rpc.transports.same_host.unix_handshake import meet_server
from replicator.rpc.transports.same_host.unix_listener import UnixListener

SECRET_NAME = "secret"
"""The file beside a socket that holds the program's secret."""
CONNECT_TIMEOUT_S = 10.0
_SOCKET_NAME = "socket"
_DEFAULT_LIMITS = MessageLimits()


def connect(
    address: str,
    *,
    secret: Secret | None = None,
    registry: Registry = DEFAULT_REGISTRY,
    limits: MessageLimits = _DEFAULT_LIMITS,
    timeout_s: float = CONNECT_TIMEOUT_S,
    tls: Tls | None = None,
    insecure: bool = False,
) -> Connection:
    """Connect to a server, by the nearest of its addresses that works.

    Args:
      address: `unix:/path`, `grpc://host:port`, `inproc:name`, or several with commas.
      secret: Secret of the program. By default, for a Unix socket, the file `secret`
        beside it; else the one that the environment points to.
      registry: Classes that may travel.
      limits: Limits of messages.
      timeout_s: Seconds that all of it may take.
      tls: Files of a client, for gRPC; needed for other hosts.
      insecure: Whether to do without TLS for those, too.

    Raises:
      ArgumentError: The address is invalid, or there is no secret.
      AuthenticationError: One end did not prove that it belongs to the program.
      ConnectionLostError: Nobody listens there, or does not answer in time.
    """
    encoding = Encoding(registry, limits)
    places = addresses.nearest_first(
        addresses.parse_all(address), is_in_process=is_in_process
    )
    if not places:
        raise ConnectionLostError(
            f"Nobody listens at {address}: no such socket on this host, or listener in "
            "this process."
        )
    # One time for all places: a nearer one that is silent leaves less for the next.
    deadline = time.monotonic() + timeout_s
    failures: list[str] = []
    for place in places:
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            match place:
                case addresses.InProcessAddress():
                    return connect_in_process(place.name, timeout_s=left_s)
                case addresses.UnixAddress():
                    return _connect_unix(place, secret, encoding, left_s)
                case addresses.GrpcAddress():
                    return _grpc().connect_grpc(
                        str(place),
                        secret=_secret_of(place, secret),
                        encoding=encoding,
                        timeout_s=left_s,
                        tls=tls,
                        insecure=insecure,
                    )
        # Not after a failed proof: a stranger at one address must not be passed over.
        except ConnectionLostError as error:
            if len(places) == 1:
                raise
            failures.append(str(error))
    raise ConnectionLostError(f"No way to {address}: {' '.join(failures)}")


def listen(
    address: str,
    *,
    secret: Secret | None = None,
    registry: Registry = DEFAULT_REGISTRY,
    limits: MessageLimits = _DEFAULT_LIMITS,
    tls: Tls | None = None,
    insecure: bool = False,
    force_encoding: bool | None = None,
) -> Listener:
    """Listen at one address.

    Args:
      address: `unix:/path`, in a directory that only this user can enter (it is made if
        its parent exists); `unix:` makes up both; `grpc://127.0.0.1:0` takes a free
        port; `inproc:name`, or `inproc:` for a random name.
      secret: Secret that clients must know. By default, for a Unix socket, the file
        `secret` beside it, or the one that the environment points to, or a new one in
        that file; for gRPC, the one that the environment points to.
      registry: Classes that may travel.
      limits: Limits of messages.
      tls: Files of a server, for gRPC; needed beyond loopback.
      insecure: Whether to do without TLS there, too.
      force_encoding: In-process: whether values go through the codec nevertheless; by
        default as in the environment.

    Raises:
      ArgumentError: The address is invalid or not safe, or there is no secret.
      AddressInUseError: Another server listens there; the error names its process.
      AuthenticationError: Others may enter the socket's directory, or have the secret.
    """
    encoding = Encoding(registry, limits)
    place = addresses.parse(address)
    match place:
        case addresses.InProcessAddress():
            return InProcessListener(
                place.name,
                encoding=encoding,
                force_encoding=force_encoding,
            )
        case addresses.UnixAddress():
            return _listen_unix(place, secret, encoding)
        case addresses.GrpcAddress():
            return _grpc().GrpcListener(
                address,
                secret=_secret_of(place, secret),
                encoding=encoding,
                tls=tls,
                insecure=insecure,
            )


def _connect_unix(
    place: addresses.UnixAddress,
    secret: Secret | None,
    encoding: Encoding,
    timeout_s: float,
) -> Connection:
    if not place.path:
        raise ArgumentError(
            "`address` must name the socket to connect to, got 'unix:'. Use the "
            "`address` of the server."
        )
    deadline = time.monotonic() + timeout_s
    addresses.check_socket_directory(place.path, address=str(place))
    # After the directory was checked: what lies beside the socket is this user's.
    secret = _secret_of(place, secret)
    sock = _connected_socket(place, timeout_s)
    return meet_server(
        sock,
        address=str(place),
        secret=secret,
        encoding=encoding,
        timeout_s=min(max(deadline - time.monotonic(), 0.0), HANDSHAKE_TIMEOUT_S),
    )


def _connected_socket(place: addresses.UnixAddress, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not Python's timeout: a full backlog would be an error at once.
        fraction, seconds = math.modf(max(timeout_s, 1e-3))
        option = struct.pack("ll", int(seconds), int(fraction * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, option)
        sock.connect(place.path)
        unbounded = struct.pack("ll", 0, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, unbounded)
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            why = f"it accepted nobody for {timeout_s:g} s"
        else:
            why = error.strerror
        raise ConnectionLostError(f"Nobody listens at {place}: {why}.") from error
    return sock


def _listen_unix(
    place: addresses.UnixAddress,
    secret: Secret | None,
    encoding: Encoding,
) -> Listener:
    owns_directory = not place.path
    if owns_directory:
        place = addresses.UnixAddress(
            os.path.join(addresses.make_socket_directory(), _SOCKET_NAME)
        )
    else:
        _make_directory(place)
    folder = os.path.dirname(place.path)
    try:
        addresses.check_socket_directory(place.path, address=str(place))
        return UnixListener(
            place.path,
            secret=secret
            or _secret_beside(place)
            or Secret.read_or_make(os.path.join(folder, SECRET_NAME)),
            encoding=encoding,
            owns_directory=owns_directory,
        )
    except BaseException:
        if owns_directory:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_directory(place: addresses.UnixAddress) -> None:
    # Only the last folder, and for this user alone; its owner is checked afterwards.
    try:
        os.mkdir(os.path.dirname(place.path), 0o700)
    except FileExistsError:
        pass  # it will be checked
    except OSError as error:
        raise ArgumentError(
            f"`address` must lie in a directory that is there or can be made, got "
            f"{place} ({error.strerror}). Use 'unix:', which makes one up."
        ) from error


def _secret_of(place: addresses.Address, secret: Secret | None) -> Secret:
    if secret is None and isinstance(place, addresses.UnixAddress):
        secret = _secret_beside(place)
    elif secret is None:
        secret = Secret.from_environment()
    if secret is None:
        raise ArgumentError(
            f"`secret` must be given for {place}: there is none beside it, and the "
            "environment points to none. Pass the server's `Secret`."
        )
    return secret


def _secret_beside(place: addresses.UnixAddress) -> Secret | None:
    """Return that of the socket's directory, or else of the environment."""
    path = os.path.join(os.path.dirname(place.path), SECRET_NAME)
    try:
        return Secret.read(path)
    except FileNotFoundError:
        return Secret.from_environment()


def _grpc() -> Any:
    """Return the module of the transport between hosts; its packages are optional."""
    try:
        from replicator.rpc.transports.between_hosts import grpc_stream
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("replicator"):
            raise
        raise ImportError(
            f"grpc:// needs the package {error.name!r}. "
            "Run `pip install 'jax-replicator[grpc]'`."
        ) from error
    return grpc_stream
