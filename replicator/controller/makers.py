"""Make a controller: over islands of this process, of this host, or elsewhere."""

import functools
from collections.abc import Sequence
from typing import Literal

from replicator.controller.controller import Controller
from replicator.controller.islands.in_process import local_islands
from replicator.controller.islands.joined import IslandAddress, JoinedIslands
from replicator.controller.islands.protocol import IslandPool, IslandReport
from replicator.controller.islands.started import StartedIslands
from replicator.errors import ArgumentError, check_count, check_positive
from replicator.rpc.client.client import Client
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls

_Addresses = str | IslandAddress | Sequence[str | IslandAddress]


def local(
    *,
    islands: int = 1,
    devices: int | None = None,
    order: Literal["weight", "fifo"] = "weight",
) -> Controller:
    """Return a controller over islands in this process.

    On CPU each island has a client of XLA to itself, so that their programs run beside
    each other; elsewhere it is some of the devices that JAX sees.

    Args:
      islands: Number of islands.
      devices: Number of devices of each; by default JAX's devices are shared out.
      order: Whose ops are next: by "weight" the client's that had the least time of
        devices for its weight, by "fifo" the first call's.

    Raises:
      ArgumentError: There are not that many devices.

    >>> with local(islands=2, devices=1) as pw:
    ...     double = pw.fn(lambda x: x * 2, pw.slice(1))
    ...     print(double(jnp.ones(2)))
    [2. 2.]
    """
    check_count("islands", islands)
    if devices is not None:
        check_count("devices", devices)
    return Controller(
        lambda report: IslandPool(islands=local_islands(islands, devices, report)),
        order=order,
    )


def start(
    *,
    islands: int = 1,
    devices: int = 1,
    processes: int = 1,
    spares: int = 0,
    lost_after_s: float = 10.0,
    order: Literal["weight", "fifo"] = "weight",
) -> Controller:
    """Start islands as processes of this host; return a controller over them.

    Each process has CPU devices of its own. It gets nothing but the programs that it
    runs; what those print goes to this process's standard error. None outlives this
    process, however it ends.

    Slices of an island that is lost go on in a spare process, or else in one that is
    started then. Calls wait for that; what lived on it is lost, and named.

    Args:
      islands: Number of islands.
      devices: Number of CPU devices of each.
      processes: Number of processes of each, over which its devices are divided; they
        are joined by `jax.distributed`.
      spares: Number of islands more that are kept for those that are lost; one that
        was taken is replaced.
      lost_after_s: Seconds without a sign of life after which an island is lost.
      order: As of `local`.

    Raises:
      ArgumentError: An argument is out of range.
      LaunchError: An island cannot be started.

    >>> with start(islands=2, devices=1) as pw:  # doctest: +SKIP
    ...     double = pw.fn(lambda x: x * 2, pw.slice(1))
    ...     print(double(jnp.ones(2)))
    [2. 2.]
    """
    check_count("islands", islands)
    check_count("devices", devices)
    check_count("processes", processes)
    if devices % processes:
        raise ArgumentError(
            f"`devices` must divide by `processes`, got {devices} for {processes}. Use "
            f"{devices - devices % processes + processes}."
        )
    check_count("spares", spares, "Use 1.", least=0)
    check_positive("lost_after_s", lost_after_s, "Use 10, or more.")

    def make(report: IslandReport) -> IslandPool:
        joined = JoinedIslands(lost_after_s=lost_after_s, report=report)
        share = (islands + spares) * devices
        started = StartedIslands(devices, processes, share=share, joined=joined)
        started.start(islands + spares)
        return IslandPool(
            islands=joined.islands,
            spares=list(joined.islands)[islands:],
            another=started.another,
            stop=started.stop,
            listen=joined.listen,
        )

    return Controller(make, order=order)


def connect(
    addresses: Sequence[_Addresses],
    secret: Secret | None = None,
    *,
    tls: Tls | None = None,
    spares: Sequence[_Addresses] = (),
    lost_after_s: float = 10.0,
    order: Literal["weight", "fifo"] = "weight",
) -> Controller:
    """Return a controller over islands that run already: each an `IslandServer`.

    Programs go there as `jax.export` has them, so one that calls back into Python is
    refused: `start` and `local` take those.

    Slices of an island that is lost go on on a spare one, or else on another that has
    devices for them, as `pw.slice` would have them.

    Args:
      addresses: Address of each: "host:7000", or as `rpc` has it, "unix:/…". An island
        of several processes, joined by `jax.distributed`, has a list of theirs. In a
        node of a program: what the handle of an `lp.IslandNode` became; it is waited
        for.
      spares: Addresses of islands more, kept for those that are lost.
      secret: Secret of the islands; by default the file beside a Unix socket, or the
        one that the environment points to.
      tls: Files of a client; needed beyond this host.
      lost_after_s: Seconds without a sign of life after which an island is lost.
      order: As of `local`.

    Raises:
      ArgumentError: An island has another version of JAX, or another controller.
      AuthenticationError: An island has another secret.
      ConnectionLostError: There is no island.
    """
    if isinstance(addresses, str) or not addresses:
        raise ArgumentError(
            f"`addresses` must be a list of at least one, got {addresses!r}. Pass that "
            "of each `IslandServer`."
        )
    check_positive("lost_after_s", lost_after_s, "Use 10, or more.")
    reach = functools.partial(_reached, secret, tls)
    found = [
        [each if isinstance(each, IslandAddress) else reach(each) for each in group]
        for group in (*_groups("addresses", addresses), *_groups("spares", spares))
    ]

    def make(report: IslandReport) -> IslandPool:
        joined = JoinedIslands(lost_after_s=lost_after_s, report=report)
        joined.join(found)
        return IslandPool(
            islands=joined.islands,
            spares=list(joined.islands)[len(addresses) :],
            listen=joined.listen,
        )

    return Controller(make, order=order)


def _groups(
    name: str, islands: Sequence[_Addresses]
) -> list[list[str | IslandAddress]]:
    """Return the addresses of the processes of each island."""
    is_one = isinstance(islands, str | IslandAddress)
    groups = []
    if not is_one:
        groups = [
            [each] if isinstance(each, str | IslandAddress) else [*each]
            for each in islands
        ]
    if is_one or not all(groups):
        raise ArgumentError(
            f"`{name}` must be a list with an address, or a list of them, for each "
            f"island, got {islands!r}. Pass that of each `IslandServer`."
        )
    return groups


def _reached(secret: Secret | None, tls: Tls | None, address: str) -> IslandAddress:
    text = address if ":/" in address else f"grpc://{address}"
    return IslandAddress(
        text=text, client=functools.partial(Client, text, secret=secret, tls=tls)
    )
