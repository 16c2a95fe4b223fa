"""Join islands that are served already to one session of a controller."""

import secrets
from collections.abc import Sequence

import jax

from replicator.controller.islands.cpu_clients import cpu_client_devices
from replicator.controller.islands.protocol import IslandDevice, Report
from replicator.controller.islands.remote import IslandParent, RemoteIsland
from replicator.errors import ArgumentError
from replicator.rpc.client.client import Client
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls


def joined_islands(
    addresses: Sequence[str],
    parents: Sequence[IslandParent] | None = None,
    *,
    lost_after_s: float,
    report: Report,
    secret: Secret | None = None,
    tls: Tls | None = None,
) -> dict[str, RemoteIsland]:
    """Join islands, by number: "island0" is at the first address.

    Args:
      addresses: Address of each.
      parents: Their processes, if this one started them.
      lost_after_s: Silence after which an island is lost.
      report: Called when a value is computed, or cannot be.
      secret: Secret of all islands; by default the file beside each socket.
      tls: Files of a client, for islands on other hosts.

    Raises:
      ArgumentError: One has another version of JAX, or another controller.
    """
    session = secrets.token_hex(8)
    names = {f"island{n}": address for n, address in enumerate(addresses)}
    clients = {
        name: Client(
            address, timeout_s=None, wait_for_ready=False, secret=secret, tls=tls
        )
        for name, address in names.items()
    }
    joined: list[Client] = []
    try:
        abouts = {
            name: _described(client, names[name]) for name, client in clients.items()
        }
        for name, client in clients.items():
            peers = {peer: names[peer] for peer in names if peer != name}
            if not client.join(session, name, peers, lost_after_s):
                raise ArgumentError(
                    "an island must have one controller at a time, got a second one "
                    f"at {names[name]}. Close the first, or start another "
                    "`IslandServer`."
                )
            joined.append(client)
    except BaseException:
        for client in joined:
            client.leave(session)
        for client in clients.values():
            client.close()
        raise
    made: dict[str, RemoteIsland] = {}

    def lost(name: str, error: BaseException) -> None:
        for other, island in made.items():
            if other != name:
                island.lose(name, error)

    for number, (name, client) in enumerate(clients.items()):
        platform, devices = abouts[name]
        stand_ins = cpu_client_devices(number, len(devices))
        made[name] = RemoteIsland(
            name,
            [
                IslandDevice(kind=kind, memory_bytes=memory_bytes, device=device)
                for (kind, memory_bytes), device in zip(devices, stand_ins, strict=True)
            ],
            client=client,
            session=session,
            platform=platform,
            report=report,
            lost_after_s=lost_after_s,
            lost=lost,
            parent=parents[number] if parents else None,
        )
    return made


def _described(client: Client, address: str) -> tuple[str, list[tuple[str, int]]]:
    version, platform, devices = client.describe()
    if version != jax.__version__:
        raise ArgumentError(
            f"an island must have the controller's version of JAX, {jax.__version__}, "
            f"got {version} at {address}. Install the same on both."
        )
    return platform, [(kind, memory_bytes) for kind, memory_bytes in devices]
