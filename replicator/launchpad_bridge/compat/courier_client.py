"""`courier.Client`, and the address of a server at a port of this host.

Launchpad's courier serves everyone who can reach a port. Here a port is the name of a
socket in a folder that only this user can enter, with the secret that both ends must
know.
"""

import contextlib
import datetime
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.nodes.courier_node import client_options_of_courier
from replicator.rpc.client.client import Client as RpcClient
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.addresses import (
    check_socket_directory,
    folder_for_sockets,
)
from replicator.rpc.transports.connect import SECRET_NAME, connect

_OURS = ("unix:", "inproc:", "grpc:")


class _MadeByCall(type):
    """Makes a class act as another one: `courier.Client(...)`, `isinstance`."""

    def __call__(
        cls,
        server_address: str,
        compress: bool = False,
        call_timeout: float | datetime.timedelta | None = None,
        wait_for_ready: bool = True,
        chunk_tensors: bool = False,
        **kwargs: Any,
    ) -> RpcClient:
        options: dict[str, Any] = {"wait_for_ready": wait_for_ready, **kwargs}
        if call_timeout is not None:
            options["call_timeout"] = call_timeout
        text = str(server_address)
        if not text.startswith(_OURS):
            # Looked up at the first call: tests give a client any text.
            options["dial"] = lambda left_s: connect(address_of(text), timeout_s=left_s)
        return RpcClient(text, **client_options_of_courier(options))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, RpcClient)


class Client(metaclass=_MadeByCall):
    """Calls the methods of a server: `Client("localhost:1234").method(...)`.

    It makes a client of `rpc`. A call without `call_timeout` has a deadline of 60 s.
    The first call refuses an invalid address.
    """


def address_of(server_address: str) -> str:
    """Return the `rpc` address for an address of courier: "localhost:1234".

    Raises:
      ArgumentError: It is not an address, or of another host.
    """
    host, _, port = server_address.rpartition(":")
    if not port.isdigit() or not _is_here(host.strip("[]")):
        raise ArgumentError(
            "`server_address` must be a port of this host, got "
            f"{server_address!r}. Use nodes of a program between hosts, which find and "
            "trust each other, or an `rpc.Server` at grpc://host:port."
        )
    return socket_of(int(port))


def socket_of(port: int) -> str:
    """Return the address of the socket for a port of this host.

    Raises:
      AuthenticationError: The folder for it is a link, or another user's.
    """
    parent = folder_for_sockets(80) or tempfile.gettempdir()
    folder = Path(parent) / f"courier-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    address = f"unix:{folder}/{port}"
    check_socket_directory(f"{folder}/{port}", address=address)  # or another user's
    if not (folder / SECRET_NAME).exists():
        Secret.read_or_make(folder / SECRET_NAME)
    return address


def _is_here(host: str) -> bool:
    if host in ("", "localhost", "::", "::1", "0.0.0.0"):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        # Only an address of this host can be bound.
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True
