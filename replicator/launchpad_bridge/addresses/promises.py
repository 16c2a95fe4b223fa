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

    def bind(self, address_builder: AbstractAddressBuilder) -> None:
        """Say what makes the address where it is asked for; the launcher does."""
        self._address_builder = address_builder

    def bind_planned(self, planned: str, owner: str, limits: MessageLimits) -> None:
        """Bind it at launch.

        Args:
          planned: A socket of the run's own, for a server of `rpc`.
          owner: The worker whose server it is.
          limits: Of messages, the program's.
        """
        self.bind(PlannedPortBuilder(planned, owner))

    def bind_here(self) -> None:
        """Bind it for use in this process, outside of any program."""
        self.bind(SimpleLocalAddressBuilder())

    @property
    def builder(self) -> AbstractAddressBuilder:
        """Return what it was bound to.

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

    def bind_planned(self, planned: str, owner: str, limits: MessageLimits) -> None:
        """Bind it to a socket of the run's own."""
        self.bind(PlannedAddressBuilder(planned, limits))

    def bind_here(self) -> None:
        """Bind it to a name in this process."""
        planned = f"inproc:{uuid.uuid4().hex}"
        self.bind(PlannedAddressBuilder(planned, MessageLimits()))


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
