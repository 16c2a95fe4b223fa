"""Devices of a node as an island of the controller, which runs in another node.

The handles of `IslandNode`s, as an argument of that node, become a list which
`controller.connect` takes. All are processes of one program, and know its secret.
"""

from typing import Any

from replicator.base.host.fake_devices import fake_devices
from replicator.base.mesh import jax_devices
from replicator.controller.islands.in_process import described
from replicator.controller.islands.joined import IslandAddress
from replicator.controller.islands.server import IslandService
from replicator.errors import check_count
from replicator.launchpad_bridge.addresses.builders import PlannedAddressBuilder
from replicator.launchpad_bridge.addresses.promises import RpcAddress
from replicator.launchpad_bridge.handles import Handle
from replicator.launchpad_bridge.nodes.courier_node import CourierHandle
from replicator.launchpad_bridge.nodes.py_node import PyNode
from replicator.launchpad_bridge.running.stopping import stop_event
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.server.server import Server

_START_S = 300.0


class IslandHandle(Handle[IslandAddress]):
    """The handle of an `IslandNode`: becomes what `controller.connect` takes."""

    def __init__(self, address: RpcAddress) -> None:
        self._address = address

    def dereference(self) -> IslandAddress:
        """Return where the island serves; `connect` waits until it does.

        Raises:
          LaunchError: The program was not launched, or is over.
        """
        options = self._address.builder.client_options()
        return IslandAddress(
            text=options["address"], client=self._client, wait_s=_START_S
        )

    def _client(self, **options: Any) -> Client:
        return CourierHandle(self._address, **options).dereference()


class IslandNode(PyNode[IslandHandle, None]):
    """Serves its devices as an island, to a controller in another node.

    It is a process under every launcher. What it takes is data and the bytes of
    `jax.export`, from processes of the program: functions that call back into Python
    are refused. It serves until the program stops; one that was started again after a
    failure is free for the next `controller.connect`.

    >>> island = program.add_node(lp.IslandNode(devices=2), label="island")
    >>> def double(island):
    ...     with controller.connect([island]) as pw:
    ...         twice = pw.fn(lambda x: x * 2, pw.slice(2))
    ...         print(twice(jnp.ones(2)))
    ...     lp.stop()
    >>> node = program.add_node(lp.PyNode(double, island), label="controller")
    """

    has_own_process = True

    def __init__(self, *, devices: int | None = None) -> None:
        """Plan an island; nothing starts yet.

        Args:
          devices: Number of CPU devices that it makes; by default it has all devices
            that JAX sees in its process, with the resources of its group.

        Raises:
          ArgumentError: `devices` is not a whole number above 0.
        """
        if devices is not None:
            check_count("devices", devices)
        super().__init__(self.run)
        self._devices = devices
        self.island_address = RpcAddress("island")
        self.allocate_address(self.island_address)

    @property
    def description(self) -> str:
        """Return what it has."""
        return "" if self._devices is None else f"devices={self._devices}"

    def create_handle(self) -> IslandHandle:
        """Return a handle, which becomes an element of what `connect` takes."""
        return self._track_handle(IslandHandle(self.island_address))

    def run(self) -> None:
        """Serve until the program stops."""
        if self._devices is not None:
            fake_devices(self._devices)
        found = jax_devices()
        service = IslandService(
            [described(device, len(found)) for device in found], connect=_connected
        )
        builder = self.island_address.builder
        at = builder.listening()
        with Server(
            service, name="island", address=at, **builder.server_options()
        ) as server:
            builder.publish(server.address)
            stop_event().wait()
            service.give_up()


def _connected(address: str) -> Client:
    """Return a client of another island of the program, wherever that is."""
    builder = PlannedAddressBuilder(address, MessageLimits())
    return Client(**builder.client_options(), timeout_s=None)
