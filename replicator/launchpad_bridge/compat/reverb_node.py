"""A Reverb replay buffer as a node: Reverb's own if it is installed, or ours.

Nothing of Reverb is imported before a node of it starts, or a handle becomes a client.
It has wheels up to Python 3.11.
"""

from collections.abc import Callable, Sequence
from typing import Any

from replicator.errors import ArgumentError, ProgramError
from replicator.launchpad_bridge.addresses.promises import (
    Address,
    get_port_from_address,
)
from replicator.launchpad_bridge.compat.reverb_server import (
    ReverbClient,
    ReverbServer,
)
from replicator.launchpad_bridge.handles import Handle
from replicator.launchpad_bridge.nodes.py_node import PyNode
from replicator.launchpad_bridge.running.stopping import stop_event


class ReverbHandle(Handle[Any]):
    """The handle of a `ReverbNode`: becomes a `reverb.Client`."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def dereference(self) -> Any:
        """Return a client of the buffer."""
        _, make_client = _server_and_client()
        return make_client(self._address.resolve())


class ReverbNode(PyNode[ReverbHandle, None]):
    """Serves a Reverb replay buffer.

    Attributes:
      reverb_address: Address of the server.
    """

    def __init__(
        self,
        priority_tables_fn: Callable[[], Sequence[Any]],
        checkpoint_ctor: Callable[[], Any] | None = None,
        checkpoint_time_delta_minutes: int | None = None,
    ) -> None:
        """Store the options; `run` makes the server.

        Args:
          priority_tables_fn: Makes the tables, in the node.
          checkpoint_ctor: Makes the checkpointer; Reverb's own by default.
          checkpoint_time_delta_minutes: Time between two saves; None for no saves.

        Raises:
          ProgramError: The time is not positive.
        """
        minutes = checkpoint_time_delta_minutes
        if minutes is not None and minutes <= 0:
            raise ProgramError(
                "Replay checkpoint time delta must be positive when specified, got "
                f"{minutes}. Use 10."
            )
        super().__init__(self.run)
        self._priority_tables_fn = priority_tables_fn
        self._checkpoint_ctor = checkpoint_ctor
        self._checkpoint_time_delta_minutes = minutes
        self.reverb_address = Address("reverb")
        self.allocate_address(self.reverb_address)

    def create_handle(self) -> ReverbHandle:
        """Return a handle, which becomes a client of the buffer."""
        return self._track_handle(ReverbHandle(self.reverb_address))

    def run(self) -> None:
        """Serve until the program stops; save at the given interval.

        Raises:
          ArgumentError: An interval is given, and Reverb is not installed: tables here
            are kept by `lp.ReplayTable`'s own means.
        """
        make_checkpointer = self._checkpoint_ctor
        make_server, _ = _server_and_client()
        minutes = self._checkpoint_time_delta_minutes
        if minutes is not None and make_server is ReverbServer:
            raise ArgumentError(
                "`checkpoint_time_delta_minutes` must be None without Reverb, got "
                f"{minutes}. Use an `lp.ReplayTable` with a folder of its own."
            )
        server = make_server(
            tables=self._priority_tables_fn(),
            port=get_port_from_address(self.reverb_address.resolve()),
            checkpointer=None if make_checkpointer is None else make_checkpointer(),
        )
        try:
            while not stop_event().wait(None if minutes is None else 60 * minutes):
                server.localhost_client().checkpoint()
        finally:
            server.stop()


def _server_and_client() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import reverb  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ReverbServer, ReverbClient
    return reverb.Server, reverb.Client
