"""Builders of addresses: known, picked here, or looked up.

fixed      known already
a port     of this host, free and not given out before; or of the node's host
planned    the run's own socket; on several hosts, the entry of an address book
"""

# ruff: noqa: B027  # one kind of builder needs methods that others leave empty

import abc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from replicator.distributed.processes.ports import free_port
from replicator.errors import LaunchError
from replicator.launchpad_bridge.running import node_context
from replicator.rpc.client.client import Client, fail_fast
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import Connection

_GIVEN_PORTS: set[int] = set()


class AbstractAddressBuilder(abc.ABC):
    """Makes an address, as the launcher of the program needs it."""

    exchange: Any = None
    """The launcher's own implementation of calls, in the launching process."""

    @abc.abstractmethod
    def build(self) -> str:
        """Return the address."""

    def client_options(self) -> dict[str, Any]:
        """Return arguments for a client of `rpc`: its address at least."""
        return {"address": self.build()}

    def server_options(self) -> dict[str, Any]:
        """Return arguments for a server of `rpc`, besides its address."""
        return {}

    def listening(self) -> str:
        """Return the address for the server to listen on."""
        return self.build()

    def publish(self, address: str) -> None:
        """Publish the server's address for clients on other hosts."""

    def look_up_in(self, workers: Any) -> None:
        """Use the launcher's `Workers` in the launching process, where no node runs."""

    def close_with_run(self, client: Any) -> None:
        """Close a client of the launching process when the run is over."""

    def note_ended(self) -> None:
        """Note that the server has ended for good."""

    def retire(self) -> None:
        """Note that its run is over."""


class AddressBook(Protocol):
    """Addresses of servers, for launchers that cannot plan them.

    A launcher offers it as `address_book` of its `NodeContext`s (for nodes) and of its
    `Workers` (for the script that launched). Without one, addresses are as planned.
    """

    def listen(self, planned: str) -> str:
        """Return the address to listen on for the server planned at `planned`."""
        ...

    def publish(self, planned: str, address: str) -> None:
        """Note the address of the server."""

    def find(self, planned: str) -> str:
        """Return the address of the server; wait, within a bound, until it is known.

        Raises:
          LaunchError: It was not published in time.
        """
        ...

    def dial(
        self, planned: str, limits: MessageLimits
    ) -> Callable[[float], Connection]:
        """Return a function that connects to a server of `rpc`, wherever it is then."""
        ...

    def server_options(self) -> Mapping[str, Any]:
        """Return arguments for a server of `rpc` that other hosts can reach."""
        ...


class SimpleLocalAddressBuilder(AbstractAddressBuilder):
    """A port of this host that was free, and that no other builder has."""

    def __init__(self) -> None:
        self._address = f"localhost:{_free_port()}"

    def build(self) -> str:
        """Return "localhost:port"."""
        return self._address


class PlannedPortBuilder(AbstractAddressBuilder):
    """A port for a server of the user's own: of this host, or of the node's.

    Args:
      planned: Name of its entry in an address book.
      owner: Worker of the server.
    """

    def __init__(self, planned: str, owner: str) -> None:
        self._planned = planned
        self._owner = owner
        self._here = SimpleLocalAddressBuilder()
        self._found: str | None = None

    def build(self) -> str:
        """Return "host:port"."""
        context = node_context.current()
        book = None if context is None else context.address_book
        if book is None:
            return self._here.build()
        if self._found is None and context is not None:
            if context.worker == self._owner:
                self._found = book.listen(self._planned)
                book.publish(self._planned, self._found)
            else:
                self._found = book.find(self._planned)
        return self._found or self._here.build()


class PlannedAddressBuilder(AbstractAddressBuilder):
    """The address of the plan, or of the launcher's address book if it has one.

    Args:
      planned: Address of the plan.
      limits: Message limits of the program.
    """

    def __init__(self, planned: str, limits: MessageLimits) -> None:
        self._planned = planned
        self._limits = limits
        # Used in the launching process; a node has it in its context.
        self._book_here: AddressBook | None = None
        self._is_over = False
        # Appended to by the launching script's threads, emptied by the driver's.
        self._clients: list[Any] = []
        self._has_ended = False  # set before `_clients` is read, read after it grew

    def build(self) -> str:
        """Return the address for clients.

        Raises:
          LaunchError: The run is over.
        """
        if self._is_over:
            raise LaunchError(
                "A handle must be used while its program runs, got one of a run that "
                "is over. Launch the program again."
            )
        book = self._book()
        return self._planned if book is None else book.find(self._planned)

    def client_options(self) -> dict[str, Any]:
        """Return arguments for a client; servers elsewhere are found when called.

        Raises:
          LaunchError: The run is over.
        """
        book = None if self._is_over else self._book()
        if book is None:
            return {"address": self.build(), "limits": self._limits}
        dial = book.dial(self._planned, self._limits)
        return {"address": self._planned, "dial": dial}

    def server_options(self) -> dict[str, Any]:
        """Return arguments for its server, besides the address."""
        book = self._book()
        options = {} if book is None else book.server_options()
        return {"limits": self._limits, **options}

    def listening(self) -> str:
        """Return the address for its server to listen on."""
        book = self._book()
        return self._planned if book is None else book.listen(self._planned)

    def publish(self, address: str) -> None:
        """Publish its server's address."""
        book = self._book()
        if book is not None:
            book.publish(self._planned, address)

    def look_up_in(self, workers: Any) -> None:
        """Use the launcher's `Workers` in the launching process, where no node runs."""
        self._book_here = getattr(workers, "address_book", None)
        self.exchange = getattr(workers, "exchange", None)

    def close_with_run(self, client: Any) -> None:
        """Close a client of the launching process when the run is over."""
        self._clients.append(client)
        if self._has_ended:
            self.note_ended()

    def note_ended(self) -> None:
        """Make clients of the launching process fail: the server is done."""
        self._has_ended = True
        for client in [*self._clients]:
            if isinstance(client, Client):  # not the client of a launcher's exchange
                fail_fast(client)

    def retire(self) -> None:
        """Close the clients of the launching process, and refuse new ones."""
        self._is_over = True
        while self._clients:
            self._clients.pop().close()

    def _book(self) -> AddressBook | None:
        context = node_context.current()
        return self._book_here if context is None else context.address_book

    def __getstate__(self) -> dict[str, Any]:
        stays_here = {"_book_here": None, "exchange": None, "_clients": []}
        return {**vars(self), **stays_here}


def _free_port() -> int:
    """Return a port that was free just now, a different one each time."""
    while (port := free_port()) in _GIVEN_PORTS:
        pass
    _GIVEN_PORTS.add(port)
    return port
