"""What all nodes have: handles in, handles out, addresses, a context at launch."""

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
    """A service of a program: what runs, and how others reach it.

    Attributes:
      addresses: Where servers of this node will listen.
      is_configured: Whether its arguments came by `configure`, after its handle.
      is_expanded: Whether a planned program has its inner nodes in its place.
      ends_program: Whether `run.wait()` waits for this and those like it alone, and
        stops the others, which serve them.
    """

    is_configured: bool = False
    is_expanded: bool = False
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
        """Return what the workers of these nodes run.

        Args:
          nodes: Of one group.
          label: Of the group.
          launch_context: Of the nodes.
        """
        raise NotImplementedError

    @property
    def arguments(self) -> Arguments:
        """Return where handles may stand; the edges of this node are found there."""
        return (), {}

    @property
    def launch_context(self) -> LaunchContext:
        """Return what the launcher filled in; before, it raises when asked."""
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
        """Know the program that this was added to, and so what takes its place."""
        self._owner = (program, label)
        for node in self.inner_nodes if self.is_expanded else ():
            node.belong_to(program, label)

    def inputs(self) -> Iterator[tuple[str, Handle[Any]]]:
        """Yield the handles among the arguments, as they are now, with their paths."""
        return handles_in(self.arguments)

    def collect_input_handles(self) -> None:
        """Look for handles in the arguments."""
        self._input_handles[:] = [handle for _, handle in self.inputs()]

    def allocate_address(self, address: Address) -> None:
        """Let a server of this node listen at an address.

        Raises:
          ProgramError: Another node owns the address.
        """
        address.assign(self)

    def bind_addresses(self, **kwargs: Any) -> None:
        """Let servers of this node listen in this process, outside of any program."""
        for address in self.addresses:
            address.bind_here()

    def forget_run(self) -> None:
        """Be as before any launch: what an earlier run made here is not used again."""

    @classmethod
    def default_launch_config(cls, launch_type: LaunchType) -> Any:
        """Return the resources of a node of this type, unless its group says others."""
        raise NotImplementedError(
            f"Launch config has to be explicitly specified for {cls.__name__}"
        )

    def _initialize_context(
        self, launch_type: LaunchType | str, launch_config: Any
    ) -> None:
        self._launch_context.initialize(launch_type, launch_config, ProgramStopper())

    def _track_handle(self, handle: HandleT) -> HandleT:
        """Remember a handle of this node; `create_handle` must."""
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
        """Return what it runs, for people."""
        return ""


def name_of(function: Callable[..., Any]) -> str:
    """Return what to call a function or a class in messages."""
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", type(function).__qualname__)
