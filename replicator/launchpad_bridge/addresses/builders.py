"""What makes an address where it is asked for: known, picked here, or looked up.

fixed      known already
a port     of this host, free and given to nobody else; or of the node's host
planned    the run's own socket; on several hosts an address book knows the rest
"""

import abc
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from replicator.errors import LaunchError
from replicator.launchpad_bridge.running import node_context
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import Connection

_GIVEN_PORTS: set[int] = set()


class AbstractAddressBuilder(abc.ABC):
    """Makes the address, on the platform that the program runs on."""

    @abc.abstractmethod
    def build(self) -> str:
        """Return the address."""


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


class FixedAddressBuilder(AbstractAddressBuilder):
    """An address that is known already."""

    def __init__(self, address: str) -> None:
        self._address = address

    def build(self) -> str:
        """Return the address."""
        return self._address


class PlannedPortBuilder(AbstractAddressBuilder):
    """A port for a server of the user's own: of this host, or of the node's.

    Attributes:
      planned: Names it in an address book.
      owner: The worker whose server it is.
    """

    def __init__(self, planned: str, owner: str) -> None:
        self.planned = planned
        self.owner = owner
        self._here = SimpleLocalAddressBuilder()
        self._found: str | None = None

    def build(self) -> str:
        """Return "host:port"."""
        context = node_context.current()
        book = None if context is None else context.address_book
        if book is None:
            return self._here.build()
        if self._found is None and context is not None:
            if context.worker == self.owner:
                self._found = book.listen(self.planned)
                book.publish(self.planned, self._found)
            else:
                self._found = book.find(self.planned)
        return self._found or self._here.build()


class PlannedAddressBuilder(AbstractAddressBuilder):
    """Where the plan says, or where the launcher's address book says it came to be.

    Attributes:
      planned: The address of the plan.
      limits: Of messages, the program's.
      book: For the launching process; a node asks that of its context.
      exchange: Likewise, for launchers with calls of their own.
      is_over: Says, in the launching process, that the run has ended.
      clients: What closes those that the launching process has made.
    """

    def __init__(self, planned: str) -> None:
        self.planned = planned
        self.limits = MessageLimits()
        self.book: AddressBook | None = None
        self.exchange: Any = None
        self.is_over = False
        self.clients: list[Callable[[], None]] = []

    def build(self) -> str:
        """Return where clients reach it.

        Raises:
          LaunchError: The run is over.
        """
        if self.is_over:
            raise LaunchError(
                "A handle must be used while its program runs, got one of a run that "
                "is over. Launch the program again."
            )
        book = self._book()
        return self.planned if book is None else book.find(self.planned)

    def client_options(self) -> dict[str, Any]:
        """Return what a client is made with: servers elsewhere are found when called.

        Raises:
          LaunchError: The run is over.
        """
        book = None if self.is_over else self._book()
        if book is None:
            return {"address": self.build(), "limits": self.limits}
        dial = book.dial(self.planned, self.limits)
        return {"address": self.planned, "dial": dial}

    def server_options(self) -> dict[str, Any]:
        """Return what its server is made with, besides where it listens."""
        book = self._book()
        of_book = {} if book is None else book.server_options()
        return {"limits": self.limits, **of_book}

    def listening(self) -> str:
        """Return where its server is to listen."""
        book = self._book()
        return self.planned if book is None else book.listen(self.planned)

    def publish(self, address: str) -> None:
        """Let others know where its server listens."""
        book = self._book()
        if book is not None:
            book.publish(self.planned, address)

    def retire(self) -> None:
        """Close the clients of the launching process, and refuse new ones."""
        self.is_over = True
        while self.clients:
            self.clients.pop()()

    def _book(self) -> AddressBook | None:
        context = node_context.current()
        return self.book if context is None else context.address_book

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "book": None, "exchange": None, "clients": []}


def _free_port() -> int:
    """Return a port that was free just now, another one each time."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in _GIVEN_PORTS:
            _GIVEN_PORTS.add(port)
            return port
