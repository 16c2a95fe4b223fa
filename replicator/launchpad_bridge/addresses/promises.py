"""Addresses that are known only once a program is launched, or once a node runs.

    Address            part of nodes and handles; has a name, belongs to one node
    builder            bound to it at launch; makes the string where it is used
    address book       of a launcher whose nodes run on several hosts: a server
                       publishes its address in it, a client looks it up

Under threads and processes all is planned before the start: `CourierNode`s listen on
sockets in the run's folder, and no port is ever free and then taken. Only an `Address`
that a user made, for a server of another kind, gets a port of this host.
"""

import logging
import os
import re
import uuid
from collections.abc import Sequence
from typing import Any

from replicator.errors import LaunchError, ProgramError
from replicator.launchpad_bridge.addresses.builders import (
    AbstractAddressBuilder,
    PlannedAddressBuilder,
    PlannedPortBuilder,
    SimpleLocalAddressBuilder,
)
from replicator.rpc.codec.message_limits import MessageLimits

_LOG = logging.getLogger(__name__)
_NAME = re.compile("[a-z][a-z0-9]*")


class Address:
    """Address of a server that is known only at run time.

    Attributes:
      name: Name of the port, for launchers that name ports.
    """

    def __init__(self, name: str | None = None) -> None:
        """Make an address that no node owns yet.

        Args:
          name: Lower-case letters and digits.

        Raises:
          ProgramError: `name` holds other characters.
        """
        if name is not None and not _NAME.fullmatch(name):
            raise ProgramError(
                f"Wrong address name: {name} does not match {_NAME.pattern}. Use "
                "lower-case letters and digits."
            )
        self.name = name
        self._address_builder: AbstractAddressBuilder | None = None
        self._owning_node: Any = None

    def bind(self, address_builder: AbstractAddressBuilder) -> None:
        """Set the builder of the address; called by the launcher."""
        self._address_builder = address_builder

    def bind_planned(self, planned: str, owner: str, limits: MessageLimits) -> None:
        """Bind it at launch.

        Args:
          planned: Socket in the run's folder, for a server of `rpc`.
          owner: Worker of the server.
          limits: Message limits of the program.
        """
        self.bind(PlannedPortBuilder(planned, owner))

    def bind_here(self) -> None:
        """Bind it for use in this process, outside of any program."""
        self.bind(SimpleLocalAddressBuilder())

    @property
    def builder(self) -> AbstractAddressBuilder:
        """Return the builder that it was bound to.

        Raises:
          LaunchError: The program was not launched, or no node owns the address.
        """
        if self._address_builder is not None:
            return self._address_builder
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

    def resolve(self) -> str:
        """Return the address.

        Raises:
          LaunchError: The program was not launched, or no node owns the address.
        """
        return self.builder.build()

    def assign(self, node: Any) -> None:
        """Make a node its owner, which must be done exactly once.

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
        # The node is not pickled, only its description.
        if not isinstance(self._owning_node, str):
            state["_owning_node"] = (
                f"Restored from pickle node named: {self._owning_node!r}"
            )
        return state


class RpcAddress(Address):
    """Address of a server of `rpc`: planned by the launch, unlike a port."""

    def bind_planned(self, planned: str, owner: str, limits: MessageLimits) -> None:
        """Bind it to a socket in the run's folder."""
        self.bind(PlannedAddressBuilder(planned, limits))

    def bind_here(self) -> None:
        """Bind it to a name in this process."""
        planned = f"inproc:{uuid.uuid4().hex}"
        self.bind(PlannedAddressBuilder(planned, MessageLimits()))


def get_port_from_address(address: str) -> int:
    """Return the port of "host:port", also of a port that the environment names.

    Args:
      address: "host:1234", or "host:name" where `LP_PORT_name` holds the number.

    >>> get_port_from_address("localhost:1234")
    1234
    """
    port = address.rsplit(":", 1)[-1]
    return int(port) if port.isdigit() else int(os.environ[f"LP_PORT_{port}"])


def bind_addresses(nodes: Sequence[Any]) -> None:
    """Let single nodes run in this process without a program, in tests.

    Args:
      nodes: Nodes whose servers will listen here.
    """
    for node in nodes:
        node.bind_addresses()
