"""Join islands that are served already to one session of a controller."""

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicator.controller.islands.cpu_clients import cpu_client_devices
from replicator.controller.islands.group import GroupIsland, Lost
from replicator.controller.islands.protocol import (
    IslandDevice,
    IslandReport,
    process_name,
)
from replicator.controller.islands.remote import IslandParent, RemoteIsland
from replicator.errors import ArgumentError, RpcError
from replicator.rpc.client.client import Client


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandAddress:
    """Where a process of an island serves.

    Attributes:
      text: Its address, for the other islands.
      client: Makes a client of it, with options of `rpc.Client`.
      wait_s: How long it may take until it serves; 0 if it serves already.
    """

    text: str
    client: Callable[..., Client]
    wait_s: float = 0.0

    def connected(self) -> Client:
        """Return a client, once it serves, which does not wait for it anew."""
        if self.wait_s:
            waiting = self.client(timeout_s=self.wait_s)
            try:
                waiting.call("describe")
            finally:
                waiting.close()
        return self.client(timeout_s=None, wait_for_ready=False)


class JoinedIslands:
    """Islands of one session, each with the addresses of the others; more may join.

    Args:
      lost_after_s: Silence after which an island is lost.
      report: Called when a value is computed, or cannot be.

    Attributes:
      islands: All by name, those that were lost too: "island0" was the first to join.
    """

    def __init__(self, *, lost_after_s: float, report: IslandReport) -> None:
        self.islands: dict[str, RemoteIsland | GroupIsland] = {}
        self._lost_after_s = lost_after_s
        self._report = report
        self._session = secrets.token_hex(8)
        # By island, the addresses of its processes by name.
        self._addresses: dict[str, dict[str, str]] = {}
        self._tell_lost: Callable[[str], None] = lambda name: None

    def listen(self, lost: Callable[[str], None]) -> None:
        """Set what is called with the name of each island that is lost."""
        self._tell_lost = lost

    def join(
        self,
        addresses: Sequence[Sequence[IslandAddress]],
        parents: Sequence[Sequence[IslandParent]] | None = None,
    ) -> None:
        """Join islands; those that are there are told, before what follows.

        Args:
          addresses: Addresses of the processes of each.
          parents: Their processes, if this one started them.

        Raises:
          ArgumentError: One has another version of JAX, or another controller, or
            more processes than addresses.
        """
        first = len(self.islands)
        there = [each for each in self.islands.values() if not each.why_lost]
        clients: list[list[Client]] = [[] for _ in addresses]
        texts = [[each.text for each in group] for group in addresses]
        joined: list[Client] = []
        try:
            for found, group in zip(clients, addresses, strict=True):
                for each in group:
                    found.append(each.connected())
            served = {
                f"island{n}": _Served.described(
                    texts[at], clients[at], parents[at] if parents else ()
                )
                for at, n in enumerate(range(first, first + len(addresses)))
            }
            names = {name: island.names(name) for name, island in served.items()}
            known: dict[str, str] = {}
            for each in there:
                known |= self._addresses[each.name]
            for each in names.values():
                known |= each
            for name, island in served.items():
                for number, client in island.clients.items():
                    self._join(client, name, process_name(name, number), known)
                    joined.append(client)
        except BaseException:
            for client in joined:
                with contextlib.suppress(RpcError):  # it is gone by itself
                    client.leave(self._session)
            for client in (each for group in clients for each in group):
                client.close()
            raise
        for each in there:
            for name, address in (at for more in names.values() for at in more.items()):
                each.meet(name, address)
        self._addresses.update(names)
        make = functools.partial(
            RemoteIsland, session=self._session, lost_after_s=self._lost_after_s
        )
        for number, (name, island) in enumerate(served.items()):
            # For traces alone, so one that takes another's place has what that had.
            self.islands[name] = island.made(
                name, number, make, report=self._report, lost=self._lost
            )

    def _join(
        self, client: Client, island: str, name: str, known: Mapping[str, str]
    ) -> None:
        peers = {peer: address for peer, address in known.items() if peer != name}
        if not client.join(self._session, island, peers, self._lost_after_s):
            raise ArgumentError(
                "an island must have one controller at a time, got a second one at "
                f"{known[name]}. Close the first, or start another `IslandServer`."
            )

    def _lost(self, name: str, error: BaseException) -> None:
        for other in list(self.islands.values()):
            if other.name != name:
                other.lose(name, error)
        self._tell_lost(name)


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
    parents: Mapping[int, IslandParent]
    platform: str
    kinds: Sequence[tuple[str, int, int]]

    @classmethod
    def described(
        cls,
        addresses: Sequence[str],
        clients: Sequence[Client],
        parents: Sequence[IslandParent],
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
        groups = len({group for *_, group in abouts})
        if groups > 1:
            raise ArgumentError(
                "`addresses` must be those of one `jax.distributed` group for an "
                f"island, got those of {groups} for one. Pass a list of its own for "
                "each."
            )
        numbers = [number for _, number, *_ in abouts]
        wanted = sorted({process for _, _, process in abouts[0][2]})
        if sorted(numbers) != wanted:
            raise ArgumentError(
                f"`addresses` must be those of all processes of an island, {wanted}, "
                f"got those of {numbers} for one. Pass a list of one for each process "
                "of its `jax.distributed` group in its place."
            )
        # Each process knows the memory of its own devices alone.
        of = dict(zip(numbers, (found for _, _, found, _ in abouts), strict=True))
        kinds = [of[process][n] for n, (_, _, process) in enumerate(abouts[0][2])]
        return cls(
            addresses=dict(zip(numbers, addresses, strict=True)),
            clients=dict(zip(numbers, clients, strict=True)),
            parents=dict(zip(numbers, parents, strict=False)),  # or none
            platform=abouts[0][0],
            kinds=kinds,
        )

    def names(self, name: str) -> dict[str, str]:
        """Return the addresses of its processes by name, for those that send to it."""
        return {process_name(name, n): at for n, at in self.addresses.items()}

    def made(
        self,
        name: str,
        number: int,
        make: Callable[..., RemoteIsland],
        *,
        report: IslandReport,
        lost: Lost,
    ) -> RemoteIsland | GroupIsland:
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

        def member(process: int, report: IslandReport, lost: Lost) -> RemoteIsland:
            return make(
                name,
                devices,
                client=self.clients[process],
                platform=self.platform,
                parent=self.parents.get(process),
                report=report,
                lost=lost,
            )

        if len(self.clients) == 1:
            return member(next(iter(self.clients)), report, lost)
        return GroupIsland(name, devices, member, report=report, lost=lost)


def _checked(
    about: tuple[Any, ...], address: str
) -> tuple[str, int, Sequence[tuple[str, int, int]], str]:
    version, platform, number, devices, group = about
    if version != jax.__version__:
        raise ArgumentError(
            f"an island must have the controller's version of JAX, {jax.__version__}, "
            f"got {version} at {address}. Install the same on both."
        )
    return platform, number, [tuple(each) for each in devices], group
