"""Addresses that are known only once a program is launched, or once a node runs.

    Address            stands in nodes and handles; has a name, belongs to one node
    builder            bound to it at launch; makes the string where it is asked for
    address book       of a launcher whose nodes live on several hosts: a server tells
                       it where it came to listen, a client asks it where that is

Under threads and processes all is planned before the start: `CourierNode`s listen on
sockets in the run's folder, and no port is ever free and then taken. Only an `Address`
that a user made, for a server of another kind, gets a port of this host.
"""

import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from replicator.errors import LaunchError, ProgramError
from replicator.launchpad_bridge.addresses.builders import (
    AbstractAddressBuilder,
    FixedAddressBuilder,
    PlannedAddressBuilder,
    PlannedPortBuilder,
    SimpleLocalAddressBuilder,
)

_LOG = logging.getLogger(__name__)
_NAME = re.compile("[a-z][a-z0-9]*")


class Address:
    """The address of a server, to be known at run time.

    Attributes:
      name: Of the port, for launchers that name ports.
    """

    def __init__(self, name: str | None = None) -> None:
        """Make one that no node owns yet.

        Args:
          name: Lower-case letters and digits.

        Raises:
          ProgramError: It is not.
        """
        if name is not None and not _NAME.fullmatch(name):
            raise ProgramError(
                f"Wrong address name: {name} does not match {_NAME.pattern}. Use "
                "lower-case letters and digits."
            )
        self.name = name
        self._address_builder: AbstractAddressBuilder | None = None
        self._owning_node: Any = None

    @property
    def builder(self) -> AbstractAddressBuilder | None:
        """Return what it was bound to."""
        return self._address_builder

    def bind(self, address_builder: AbstractAddressBuilder) -> None:
        """Say what makes the address where it is asked for; the launcher does."""
        self._address_builder = address_builder

    def bind_planned(self, planned: str, owner: str) -> None:
        """Bind it at launch.

        Args:
          planned: A socket of the run's own, for a server of `rpc`.
          owner: The worker whose server it is.
        """
        self.bind(PlannedPortBuilder(planned, owner))

    def bind_here(self) -> None:
        """Bind it for use in this process, outside of any program."""
        self.bind(SimpleLocalAddressBuilder())

    def retire(self) -> None:
        """Know that the run it was bound for is over."""

    def close_with_run(self, close: Callable[[], None]) -> None:
        """Close a client of the launching process when the run is over."""

    def look_up_in(self, workers: Any) -> None:
        """Ask what the launcher made, in the launching process, where no node runs."""

    @property
    def exchange(self) -> Any:
        """Return the launcher's own way of calls, in the launching process."""
        return None

    def resolve(self) -> str:
        """Return the address.

        Raises:
          LaunchError: The program was not launched, or no node owns the address.
        """
        if self._address_builder is not None:
            return self._address_builder.build()
        if self._owning_node is None:
            raise LaunchError(
                "The lp.Address hasn't been assigned to any node, thus it cannot be "
                "resolved. Use `address.assign(node)` to assign an address to a node"
            )
        raise LaunchError(
            f"The lp.Address associated to the node {self._owning_node} has not been "
            "bound to any address builder. Launchpad is responsible for doing that at "
            "launch time: call `lp.launch(program)` before you use a handle. In a "
            "test, `lp.bind_addresses([node])` does it for single nodes."
        )

    def client_options(self) -> dict[str, Any]:
        """Return what a client of `rpc` is made with: its address at least."""
        return {"address": self.resolve()}

    def assign(self, node: Any) -> None:
        """Let a node own it, which must be done exactly once.

        Raises:
          ProgramError: Another node owns it.
        """
        if self._owning_node is node:
            _LOG.warning(
                "You are binding an lp.Address twice on the same node of type %s "
                "it's probably a mistake.",
                node,
            )
            return
        if self._owning_node is not None:
            raise ProgramError(
                "You are associating a node to this lp.Address which is already "
                "assigned to another node. The previous node and the new node are:\n"
                f"{self._owning_node}\n{node}"
            )
        self._owning_node = node
        node.addresses.append(self)

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        # The node stays where it is: what travels is its description.
        if not isinstance(self._owning_node, str):
            state["_owning_node"] = (
                f"Restored from pickle node named: {self._owning_node!r}"
            )
        return state


class RpcAddress(Address):
    """Where a server of `rpc` listens: planned by the launch, unlike a port."""

    def bind_planned(self, planned: str, owner: str) -> None:
        """Bind it to a socket of the run's own."""
        self.bind(PlannedAddressBuilder(planned))

    def bind_here(self) -> None:
        """Bind it to a name in this process."""
        self.bind(FixedAddressBuilder(f"inproc:{uuid.uuid4().hex}"))

    def retire(self) -> None:
        """Refuse clients from now on: the run is over, and so is the server."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            self._address_builder.retire()

    def close_with_run(self, close: Callable[[], None]) -> None:
        """Close a client of the launching process when the run is over."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            self._address_builder.clients.append(close)

    def look_up_in(self, workers: Any) -> None:
        """Ask what the launcher made, in the launching process, where no node runs."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            self._address_builder.book = getattr(workers, "address_book", None)
            self._address_builder.exchange = getattr(workers, "exchange", None)

    @property
    def exchange(self) -> Any:
        """Return the launcher's own way of calls, in the launching process."""
        return getattr(self._address_builder, "exchange", None)

    def listening(self) -> str:
        """Return where its server is to listen."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            return self._address_builder.listening()
        return self.resolve()

    def client_options(self) -> dict[str, Any]:
        """Return what a client is made with; on several hosts, also how to connect."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            return self._address_builder.client_options()
        return super().client_options()

    def server_options(self) -> dict[str, Any]:
        """Return what its server is made with, besides where it listens."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            return self._address_builder.server_options()
        return {}

    def publish(self, address: str) -> None:
        """Let clients on other hosts know where its server listens."""
        if isinstance(self._address_builder, PlannedAddressBuilder):
            self._address_builder.publish(address)


def get_port_from_address(address: str) -> int:
    """Return the port of "host:port", also of a port that the environment names.

    Args:
      address: "host:1234", or "host:name" where `LP_PORT_name` holds the number.
    """
    port = address.rsplit(":", 1)[-1]
    return int(port) if port.isdigit() else int(os.environ[f"LP_PORT_{port}"])


def bind_addresses(nodes: Sequence[Any]) -> None:
    """Let single nodes run in this process without a program: for tests of them.

    Args:
      nodes: Whose servers will listen here.
    """
    for node in nodes:
        node.bind_addresses()
