"""Base class of nodes: handles in and out, addresses, a context at launch."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from replicator.launchpad_bridge.addresses.promises import Address
from replicator.launchpad_bridge.handles import Arguments, Handle, handles_in
from replicator.launchpad_bridge.launch_types import LaunchType
from replicator.launchpad_bridge.running.node_context import (
    LaunchContext,
    ProgramStopper,
)

HandleT = TypeVar("HandleT", bound="Handle[Any]")


class Node(abc.ABC, Generic[HandleT]):
    """A service of a program: its function, and the handles of others to it.

    Attributes:
      addresses: Addresses of this node's servers.
      is_configured: Whether its arguments came by `configure`, after its handle.
      is_expanded: Whether a planned program has its inner nodes in its place.
      has_own_process: Whether its worker is a process even if others are threads.
      ends_program: Whether `run.wait()` waits only for nodes like this, and then stops
        all others.
    """

    is_configured: bool = False
    is_expanded: bool = False
    has_own_process: bool = False
    ends_program: bool = False

    def __init__(self) -> None:
        self._launch_context = LaunchContext()
        self._input_handles: list[Handle[Any]] = []
        self._created_handles: list[Handle[Any]] = []
        self._owner: tuple[Any, str] | None = None
        self.addresses: list[Address] = []

    @abc.abstractmethod
    def create_handle(self) -> HandleT:
        """Return a handle for other nodes; calls `_track_handle`."""

    @staticmethod
    def to_executables(
        nodes: "Sequence[Any]", label: str, launch_context: LaunchContext
    ) -> list[Callable[[], Any]]:
        """Return the function of the worker of each node.

        Args:
          nodes: Nodes of one group.
          label: Label of the group.
          launch_context: Launch context of the nodes.
        """
        raise NotImplementedError

    @property
    def arguments(self) -> Arguments:
        """Return the arguments, which may hold handles: the edges of this node."""
        return (), {}

    @property
    def launch_context(self) -> LaunchContext:
        """Return the launch context; its properties raise before the launch."""
        return self._launch_context

    @property
    def input_handles(self) -> list[Handle[Any]]:
        """Return the handles that this node uses."""
        return list(self._input_handles)

    @property
    def created_handles(self) -> list[Handle[Any]]:
        """Return the handles that others may use."""
        return list(self._created_handles)

    @property
    def inner_nodes(self) -> "list[Node[Any]]":
        """Return the nodes that run inside of this one."""
        return []

    @property
    def owner(self) -> tuple[Any, str] | None:
        """Return the program that it was added to, and the label there."""
        return self._owner

    def belong_to(self, program: Any, label: str) -> None:
        """Note the program that this was added to, and in nodes that replace it."""
        self._owner = (program, label)
        for node in self.inner_nodes if self.is_expanded else ():
            node.belong_to(program, label)

    def inputs(self) -> Iterator[tuple[str, Handle[Any]]]:
        """Yield the handles among the arguments, as they are now, with their paths."""
        return handles_in(self.arguments)

    def collect_input_handles(self) -> None:
        """Find the handles in the arguments."""
        self._input_handles[:] = [handle for _, handle in self.inputs()]

    def allocate_address(self, address: Address) -> None:
        """Assign an address to a server of this node.

        Raises:
          ProgramError: Another node owns the address.
        """
        address.assign(self)

    def bind_addresses(self, **kwargs: Any) -> None:
        """Bind all addresses for use in this process, outside of any program."""
        for address in self.addresses:
            address.bind_here()

    def forget_run(self) -> None:
        """Drop all that an earlier run made here."""

    @classmethod
    def default_launch_config(cls, launch_type: LaunchType) -> Any:
        """Return the resources of a node of this type, if its group sets none."""
        raise NotImplementedError(
            f"Launch config has to be explicitly specified for {cls.__name__}"
        )

    def _initialize_context(
        self, launch_type: LaunchType | str, launch_config: Any
    ) -> None:
        self._launch_context.initialize(launch_type, launch_config, ProgramStopper())

    def _track_handle(self, handle: HandleT) -> HandleT:
        """Note a handle of this node; `create_handle` must call it."""
        handle.node = self
        self._created_handles.append(handle)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        # A recipe holds the node, not the program around it.
        stays_here = {"_owner": None, "_created_handles": [], "_input_handles": []}
        return {**vars(self), **stays_here}

    def __repr__(self) -> str:
        label = f" {self._owner[1]!r}" if self._owner else ""
        return f"<{type(self).__name__}{label} {self.description}>"

    @property
    def description(self) -> str:
        """Return the name of the function or class that it runs, for messages."""
        return ""


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function or a class for messages.

    >>> name_of(Node.inputs)
    'Node.inputs'
    """
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", type(function).__qualname__)
