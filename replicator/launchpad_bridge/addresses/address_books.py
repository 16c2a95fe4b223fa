"""Find the servers of a program on several hosts by their planned addresses.

    registry     one for the program: real addresses, by planned ones
    book         one for a node, or the launching script: finds, publishes, connects

A server listens at a Unix socket in the run's folder, which has the same path on all
hosts, and at a port of its host for the others: gRPC with TLS. Clients on the same host
find the socket by the plan alone. The rest ask when they connect, not before: nodes
that know each other start in any order, and one that was started again is found anew.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from replicator.base.accepts import accepts, seconds, text
from replicator.distributed.processes.ports import free_port
from replicator.errors import ConnectionLostError, LaunchError
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import Connection
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.transports.connect import connect

FIND_S = 60.0
_PORT = "port:"
_SLACK_S = 5.0
_MOST_ADDRESSES = 65_536
_ADDRESS = text(4_096)
_DEFAULT_LIMITS = MessageLimits()


class AddressRegistry:
    """All addresses of a program; lives in one process, asked from all hosts."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        # Belongs to one event loop, as all else here: nothing else runs between two
        # `await`s, so `_found` needs no lock. Notified for each address; all that wait
        # look for their own.
        self._news = asyncio.Condition()

    async def publish(self, planned: str, address: str) -> None:
        """Take note of where a server listens, in place of where it did before."""
        async with self._news:
            # Asked from all hosts: a node at fault must not fill this process's memory.
            if planned not in self._found and len(self._found) >= _MOST_ADDRESSES:
                raise LaunchError(
                    f"A program must have at most {_MOST_ADDRESSES} addresses, got one "
                    "more. See what publishes them."
                )
            # A server that was started again listens at another port.
            self._found[planned] = address
            self._news.notify_all()

    async def find(self, planned: str, timeout_s: float) -> str | None:
        """Return where a server listens, None if that is not known in time."""
        if planned in self._found:
            return self._found[planned]
        async with self._news:
            known = self._news.wait_for(lambda: planned in self._found)
            try:
                await asyncio.wait_for(known, timeout_s)
            except TimeoutError:
                return None
            return self._found[planned]


class RegistryAccess(Protocol):
    """Access to the registry, from any process."""

    def publish(self, planned: str, address: str) -> None:
        """Take note of where a server listens."""

    def find(self, planned: str, timeout_s: float) -> str | None:
        """Return where a server listens, None if that is not known in time."""
        ...


class OfferedRegistry:
    """A registry as workers on this host may call it.

    Args:
      registry: The way to it.
    """

    def __init__(self, registry: RegistryAccess) -> None:
        self._registry = registry

    @accepts(planned=_ADDRESS, address=_ADDRESS)
    def publish(self, planned: str, address: str) -> None:
        """Take note of where a server listens."""
        self._registry.publish(planned, address)

    @accepts(planned=_ADDRESS, timeout_s=seconds())
    def find(self, planned: str, timeout_s: float) -> str | None:
        """Return where a server listens, None if that is not known in time."""
        return self._registry.find(planned, min(timeout_s, FIND_S))


class Book:
    """An `AddressBook` of one host.

    Args:
      registry: The way to the registry.
      folder: Of the run, on this host: holds the secret, and the certificates in `tls`.
      host: Under which others reach this one.
    """

    def __init__(self, registry: RegistryAccess, *, folder: Path, host: str) -> None:
        self._registry = registry
        self._folder = folder
        self._host = host

    def listen(self, planned: str) -> str:
        """Return the address that the server planned at `planned` is to listen on."""
        if planned.startswith(_PORT):
            return f"{self._host}:{free_port(self._host)}"
        return f"{planned},grpc://{self._host}:0"

    def publish(self, planned: str, address: str) -> None:
        """Take note of where it listens."""
        self._registry.publish(planned, address)

    def find(self, planned: str, timeout_s: float = FIND_S) -> str:
        """Return where it listens; waits until that is known.

        Raises:
          LaunchError: It was not published in time.
        """
        address = self._registry.find(planned, timeout_s)
        if address is None:
            raise LaunchError(
                f"The server planned at {planned} did not listen within "
                f"{timeout_s:.0f} s. See whether its constructor returns."
            )
        return address

    def server_options(self) -> Mapping[str, Any]:
        """Return what a server needs to be reached from other hosts."""
        return {"secret": self._secret(), "tls": self._tls("server")}

    def dial(
        self, planned: str, limits: MessageLimits = _DEFAULT_LIMITS
    ) -> Callable[[float], Connection]:
        """Return what connects to a server, wherever it is by then."""

        def connect_now(timeout_s: float) -> Connection:
            # First the socket: on the same host it is faster, and needs no registry.
            until_s = time.monotonic() + timeout_s
            try:
                return connect(planned, limits=limits, timeout_s=timeout_s)
            except ConnectionLostError:
                pass  # not on this host
            left_s = max(0.0, until_s - time.monotonic())
            address = self._registry.find(planned, left_s)
            if address is None:
                raise ConnectionLostError(f"Nobody listens at {planned} yet.")
            return connect(
                address,
                secret=self._secret(),
                limits=limits,
                tls=self._tls("client"),
                timeout_s=max(1e-3, until_s - time.monotonic()),
            )

        return connect_now

    def _secret(self) -> Secret:
        return Secret.read(self._folder / "secret")

    def _tls(self, role: Any) -> Tls:
        return Tls.in_folder(self._folder / "tls", role)


class RegistryOfParent:
    """A registry that is reached through the process that started this one.

    Args:
      address: Of a server with the registry's methods, on this host.
    """

    def __init__(self, address: str) -> None:
        self._client = Client(address, timeout_s=FIND_S + _SLACK_S)

    def publish(self, planned: str, address: str) -> None:
        """Take note of where a server listens."""
        self._client.call("publish", [planned, address])

    def find(self, planned: str, timeout_s: float) -> str | None:
        """Return where a server listens, None if that is not known in time."""
        return self._client.call(
            "find", [planned, timeout_s], timeout_s=timeout_s + _SLACK_S
        )

    def close(self) -> None:
        """Ask no more."""
        self._client.close()
