"""Make islands of this process: of clients of XLA, or of the devices that JAX sees."""

import os

from replicator.base.mesh import jax_devices
from replicator.base.types import Device
from replicator.controller.islands import cpu_clients
from replicator.controller.islands.local import LocalIsland
from replicator.controller.islands.protocol import IslandDevice, IslandReport
from replicator.errors import ArgumentError


def local_islands(
    islands: int, devices: int | None, report: IslandReport
) -> dict[str, LocalIsland]:
    """Make islands in this process.

    Args:
      islands: Number of islands.
      devices: Number of devices of each; as many as there are by default.
      report: Called when a value is computed, or cannot be.

    Raises:
      ArgumentError: There are not that many devices.
    """
    found = jax_devices()
    each = devices or max(1, len(found) // islands)
    if found[0].platform == "cpu":
        groups = [cpu_clients.cpu_client_devices(n, each) for n in range(islands)]
    elif islands * each <= len(found):
        groups = [found[n * each : (n + 1) * each] for n in range(islands)]
    else:
        raise ArgumentError(
            f"`islands` times `devices` must be at most the {len(found)} devices that "
            f"JAX sees, got {islands} times {each}. Ask for fewer."
        )
    made: dict[str, LocalIsland] = {}
    for number, group in enumerate(groups):
        about = [described(device, islands * each) for device in group]
        name = f"island{number}"
        made[name] = LocalIsland(name, about, report=report, peers=made)
    return made


def described(device: Device, num_devices: int) -> IslandDevice:
    """Return a device, as one of several that share a host's memory."""
    is_here = device.process_index == device.client.process_index()
    stats = (device.memory_stats() if is_here else None) or {}
    # Those of CPU share the memory of the host.
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices
    limit = stats.get("bytes_limit") or share
    return IslandDevice(
        kind=device.device_kind,
        memory_bytes=limit,
        device=device,
        process=device.process_index,
    )
