"""Join islands that are served already to one session of a controller."""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicator.controller.islands.cpu_clients import cpu_client_devices
from replicator.controller.islands.group import GroupIsland, Lost
from replicator.controller.islands.protocol import (
    Island,
    IslandDevice,
    Report,
    process_name,
)
from replicator.controller.islands.remote import IslandParent, RemoteIsland
from replicator.errors import ArgumentError
from replicator.rpc.client.client import Client
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls


def joined_islands(
    addresses: Sequence[Sequence[str]],
    parents: Sequence[Sequence[IslandParent]] | None = None,
    *,
    lost_after_s: float,
    report: Report,
    secret: Secret | None = None,
    tls: Tls | None = None,
) -> dict[str, Island]:
    """Join islands, by number: "island0" is at the first addresses.

    Args:
      addresses: Addresses of the processes of each.
      parents: Their processes, if this one started them.
      lost_after_s: Silence after which an island is lost.
      report: Called when a value is computed, or cannot be.
      secret: Secret of all islands; by default the file beside each socket.
      tls: Files of a client, for islands on other hosts.

    Raises:
      ArgumentError: One has another version of JAX, or another controller, or more
        processes than addresses.
    """
    session = secrets.token_hex(8)
    clients = [
        [
            Client(each, timeout_s=None, wait_for_ready=False, secret=secret, tls=tls)
            for each in group
        ]
        for group in addresses
    ]
    joined: list[Client] = []
    try:
        served = {
            f"island{n}": _Served.described(
                group, clients[n], parents[n] if parents else [None] * len(group)
            )
            for n, group in enumerate(addresses)
        }
        known: dict[str, str] = {}
        for name, island in served.items():
            known |= island.peers(name)
        for name, island in served.items():
            for number, client in island.clients.items():
                peers = {**known}
                address = peers.pop(process_name(name, number))
                if not client.join(session, name, peers, lost_after_s):
                    raise ArgumentError(
                        "an island must have one controller at a time, got a second "
                        f"one at {address}. Close the first, or start another "
                        "`IslandServer`."
                    )
                joined.append(client)
    except BaseException:
        for client in joined:
            client.leave(session)
        for client in (each for group in clients for each in group):
            client.close()
        raise
    made: dict[str, Island] = {}

    def lost(name: str, error: BaseException) -> None:
        for other, island in made.items():
            if other != name:
                island.lose(name, error)

    make = functools.partial(RemoteIsland, session=session, lost_after_s=lost_after_s)
    for n, (name, island) in enumerate(served.items()):
        made[name] = island.made(name, n, make, report=report, lost=lost)
    return made


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """An island that is served by one process, or by several.

    Attributes:
      addresses: Address of each process, by its number in the group.
      clients: Client of each, likewise.
      parents: The processes themselves, likewise, if this one started them.
      platform: Of the devices.
      kinds: Kind, memory and number of the process of each device.
    """

    addresses: Mapping[int, str]
    clients: Mapping[int, Client]
    parents: Mapping[int, IslandParent | None]
    platform: str
    kinds: Sequence[tuple[str, int, int]]

    @classmethod
    def described(
        cls,
        addresses: Sequence[str],
        clients: Sequence[Client],
        parents: Sequence[IslandParent | None],
    ) -> "_Served":
        """Ask processes what they have.

        Raises:
          ArgumentError: One has another version of JAX, or they are not all those of
            one group.
        """
        abouts = [
            _checked(client.describe(), address)
            for client, address in zip(clients, addresses, strict=True)
        ]
        numbers = [number for _, number, _ in abouts]
        wanted = sorted({process for _, _, process in abouts[0][2]})
        if sorted(numbers) != wanted:
            raise ArgumentError(
                f"an island must have the addresses of all processes {wanted} of its "
                f"`jax.distributed` group, got those of {numbers} at "
                f"{', '.join(addresses)}. Pass a list with one for each."
            )
        # Each process knows the memory of its own devices alone.
        of = dict(zip(numbers, (found for _, _, found in abouts), strict=True))
        kinds = [of[process][n] for n, (_, _, process) in enumerate(abouts[0][2])]
        return cls(
            addresses=dict(zip(numbers, addresses, strict=True)),
            clients=dict(zip(numbers, clients, strict=True)),
            parents=dict(zip(numbers, parents, strict=True)),
            platform=abouts[0][0],
            kinds=kinds,
        )

    def peers(self, name: str) -> dict[str, str]:
        """Return the addresses of its processes by name, for those that send to it."""
        return {process_name(name, n): at for n, at in self.addresses.items()}

    def made(
        self,
        name: str,
        number: int,
        make: Callable[..., RemoteIsland],
        *,
        report: Report,
        lost: Lost,
    ) -> Island:
        """Return it as the controller has it, who traces for stand-in devices.

        Args:
          name: Its name.
          number: Number of the client of the stand-ins.
          make: Makes the island of one process.
          report: Called when a value is computed, or cannot be.
          lost: Called with its name and an error when it is lost.
        """
        devices = [
            IslandDevice(kind=kind, memory_bytes=size, process=process, device=device)
            for (kind, size, process), device in zip(
                self.kinds, cpu_client_devices(number, len(self.kinds)), strict=True
            )
        ]

        def member(process: int, report: Report, lost: Lost) -> RemoteIsland:
            return make(
                name,
                devices,
                client=self.clients[process],
                platform=self.platform,
                parent=self.parents[process],
                report=report,
                lost=lost,
            )

        if len(self.clients) == 1:
            return member(next(iter(self.clients)), report, lost)
        return GroupIsland(name, devices, member, report=report, lost=lost)


def _checked(
    about: tuple[Any, ...], address: str
) -> tuple[str, int, Sequence[tuple[str, int, int]]]:
    version, platform, number, devices = about
    if version != jax.__version__:
        raise ArgumentError(
            f"an island must have the controller's version of JAX, {jax.__version__}, "
            f"got {version} at {address}. Install the same on both."
        )
    return platform, number, [tuple(each) for each in devices]
