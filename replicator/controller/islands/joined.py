"""Join islands that are served already to one session of a controller."""

import secrets
from collections.abc import Callable, Sequence

import jax

from replicator.controller.islands.cpu_clients import cpu_client_devices
from replicator.controller.islands.protocol import IslandDevice, Report
from replicator.controller.islands.remote import IslandParent, RemoteIsland
from replicator.errors import ArgumentError
from replicator.rpc.client.client import Client
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls


class JoinedIslands:
    """Islands of one session, each with the addresses of the others; more may join.

    Args:
      lost_after_s: Silence after which an island is lost.
      report: Called when a value is computed, or cannot be.
      secret: Secret of all islands; by default the file beside each socket.
      tls: Files of a client, for islands on other hosts.

    Attributes:
      islands: All by name, those that were lost too: "island0" was the first to join.
    """

    def __init__(
        self,
        *,
        lost_after_s: float,
        report: Report,
        secret: Secret | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.islands: dict[str, RemoteIsland] = {}
        self._lost_after_s = lost_after_s
        self._report = report
        self._secret, self._tls = secret, tls
        self._session = secrets.token_hex(8)
        self._addresses: dict[str, str] = {}
        self._tell_lost: Callable[[str], None] = lambda name: None

    def listen(self, lost: Callable[[str], None]) -> None:
        """Set what is called with the name of each island that is lost."""
        self._tell_lost = lost

    def join(
        self, addresses: Sequence[str], parents: Sequence[IslandParent] | None = None
    ) -> None:
        """Join islands; those that are there are told, before what follows.

        Args:
          addresses: Address of each.
          parents: Their processes, if this one started them.

        Raises:
          ArgumentError: One has another version of JAX, or another controller.
        """
        first = len(self.islands)
        names = {f"island{n}": at for n, at in enumerate(addresses, first)}
        there = [each for each in self.islands.values() if not each.why_lost]
        known = {each.name: self._addresses[each.name] for each in there} | names
        clients = {name: self._client(address) for name, address in names.items()}
        joined: list[Client] = []
        try:
            abouts = [_described(clients[name], names[name]) for name in names]
            for name, client in clients.items():
                peers = {peer: known[peer] for peer in known if peer != name}
                if not client.join(self._session, name, peers, self._lost_after_s):
                    raise ArgumentError(
                        "an island must have one controller at a time, got a second "
                        f"one at {names[name]}. Close the first, or start another "
                        "`IslandServer`."
                    )
                joined.append(client)
        except BaseException:
            for client in joined:
                client.leave(self._session)
            for client in clients.values():
                client.close()
            raise
        for each in there:
            for name, address in names.items():
                each.meet(name, address)
        self._addresses.update(names)
        for number, (name, client) in enumerate(clients.items()):
            platform, devices = abouts[number]
            # For traces alone, so one that takes another's place has what that had.
            stand_ins = cpu_client_devices(number, len(devices))
            self.islands[name] = RemoteIsland(
                name,
                [
                    IslandDevice(kind=kind, memory_bytes=memory_bytes, device=device)
                    for (kind, memory_bytes), device in zip(
                        devices, stand_ins, strict=True
                    )
                ],
                client=client,
                session=self._session,
                platform=platform,
                report=self._report,
                lost_after_s=self._lost_after_s,
                lost=self._lost,
                parent=parents[number] if parents else None,
            )

    def _client(self, address: str) -> Client:
        return Client(
            address,
            timeout_s=None,
            wait_for_ready=False,
            secret=self._secret,
            tls=self._tls,
        )

    def _lost(self, name: str, error: BaseException) -> None:
        for other in list(self.islands.values()):
            if other.name != name:
                other.lose(name, error)
        self._tell_lost(name)


def _described(client: Client, address: str) -> tuple[str, list[tuple[str, int]]]:
    version, platform, devices = client.describe()
    if version != jax.__version__:
        raise ArgumentError(
            f"an island must have the controller's version of JAX, {jax.__version__}, "
            f"got {version} at {address}. Install the same on both."
        )
    return platform, [(kind, memory_bytes) for kind, memory_bytes in devices]
