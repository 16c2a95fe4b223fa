"""What makes an address where it is asked for: known, picked here, or looked up.

fixed      known already
a port     of this host, free and given to nobody else; or of the node's host
planned    the run's own socket; on several hosts an address book knows the rest
"""

# ruff: noqa: B027  # what one kind of builder does, the others need not

import abc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from replicator.distributed.processes.ports import free_port
from replicator.errors import LaunchError
from replicator.launchpad_bridge.running import node_context
from replicator.rpc.client.client import Client, wait_no_longer
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import Connection

_GIVEN_PORTS: set[int] = set()


class AbstractAddressBuilder(abc.ABC):
    """Makes the address, on the platform that the program runs on."""

    exchange: Any = None
    """The launcher's own way of calls, in the launching process."""

    @abc.abstractmethod
    def build(self) -> str:
        """Return the address."""

    def client_options(self) -> dict[str, Any]:
        """Return what a client of `rpc` is made with: its address at least."""
        return {"address": self.build()}

    def server_options(self) -> dict[str, Any]:
        """Return what a server of `rpc` is made with, besides where it listens."""
        return {}

    def listening(self) -> str:
        """Return where the server is to listen."""
        return self.build()

    def publish(self, address: str) -> None:
        """Let clients on other hosts know where the server listens."""

    def look_up_in(self, workers: Any) -> None:
        """Ask what the launcher made, in the launching process, where no node runs."""

    def close_with_run(self, client: Any) -> None:
        """Close a client of the launching process when the run is over."""

    def note_ended(self) -> None:
        """Know that the server has ended for good."""

    def retire(self) -> None:
        """Know that the run it was made for is over."""


class AddressBook(Protocol):
    """Where servers came to listen, for launchers that cannot plan it.

    A launcher offers it as `address_book` of its `NodeContext`s (for nodes) and of its
    `Workers` (for the script that launched). Without one, addresses are as planned.
    """

    def listen(self, planned: str) -> str:
        """Return the address that the server planned at `planned` is to listen on."""
        ...

    def publish(self, planned: str, address: str) -> None:
        """Take note of where it listens."""
        ...

    def find(self, planned: str) -> str:
        """Return where it listens; waits, within a bound, until that is known.

        Raises:
          LaunchError: It was not published in time.
        """
        ...

    def dial(
        self, planned: str, limits: MessageLimits
    ) -> Callable[[float], Connection]:
        """Return what connects to a server of `rpc`, wherever it is by then."""
        ...

    def server_options(self) -> Mapping[str, Any]:
        """Return what a server of `rpc` needs to be reached from other hosts."""
        ...


class SimpleLocalAddressBuilder(AbstractAddressBuilder):
    """A port of this host that was free, and that no other builder was given."""

    def __init__(self) -> None:
        self._address = f"localhost:{_free_port()}"

    def build(self) -> str:
        """Return "localhost:port"."""
        return self._address


class PlannedPortBuilder(AbstractAddressBuilder):
    """A port for a server of the user's own: of this host, or of the node's.

    Args:
      planned: Names it in an address book.
      owner: The worker whose server it is.
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
    """Where the plan says, or where the launcher's address book says it came to be.

    Args:
      planned: The address of the plan.
      limits: Of messages, the program's.
    """

    def __init__(self, planned: str, limits: MessageLimits) -> None:
        self._planned = planned
        self._limits = limits
        # Of the launching process; a node asks its context.
        self._book_here: AddressBook | None = None
        self._is_over = False
        # Appended to by the launching script's threads, emptied by the driver's.
        self._clients: list[Any] = []
        self._has_ended = False  # set before `_clients` is read, read after it grew

    def build(self) -> str:
        """Return where clients reach it.

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
        """Return what a client is made with: servers elsewhere are found when called.

        Raises:
          LaunchError: The run is over.
        """
        book = None if self._is_over else self._book()
        if book is None:
            return {"address": self.build(), "limits": self._limits}
        dial = book.dial(self._planned, self._limits)
        return {"address": self._planned, "dial": dial}

    def server_options(self) -> dict[str, Any]:
        """Return what its server is made with, besides where it listens."""
        book = self._book()
        of_book = {} if book is None else book.server_options()
        return {"limits": self._limits, **of_book}

    def listening(self) -> str:
        """Return where its server is to listen."""
        book = self._book()
        return self._planned if book is None else book.listen(self._planned)

    def publish(self, address: str) -> None:
        """Let others know where its server listens."""
        book = self._book()
        if book is not None:
            book.publish(self._planned, address)

    def look_up_in(self, workers: Any) -> None:
        """Ask what the launcher made, in the launching process, where no node runs."""
        self._book_here = getattr(workers, "address_book", None)
        self.exchange = getattr(workers, "exchange", None)

    def close_with_run(self, client: Any) -> None:
        """Close a client of the launching process when the run is over."""
        self._clients.append(client)
        if self._has_ended:
            self.note_ended()

    def note_ended(self) -> None:
        """Let clients of the launching process not wait for a server that is done."""
        self._has_ended = True
        for client in [*self._clients]:
            if isinstance(client, Client):  # not what a launcher has in its place
                wait_no_longer(client)

    def retire(self) -> None:
        """Close the clients of the launching process, and refuse new ones."""
        self._is_over = True
        while self._clients:
            self._clients.pop().close()

    def _book(self) -> AddressBook | None:
        context = node_context.current()
        return self._book_here if context is None else context.address_book

    def __getstate__(self) -> dict[str, Any]:
        of_launcher = {"_book_here": None, "exchange": None, "_clients": []}
        return {**vars(self), **of_launcher}


def _free_port() -> int:
    """Return a port that was free just now, another one each time."""
    while (port := free_port()) in _GIVEN_PORTS:
        pass
    _GIVEN_PORTS.add(port)
    return port
