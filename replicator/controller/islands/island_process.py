"""The process of an island that `controller.start` made: serve it until the end.

    parent ── settings; recipes, as they come ──> standard input
    parent <── the address, a line ────────────── standard output, once

All else goes by `rpc`, at a Unix socket in a private folder that the parent made. When
the parent is gone the input ends, and so does this process, by its guard at the latest.
"""

import dataclasses
import json
import os
import sys

from replicator.base.host.fake_devices import fake_devices
from replicator.base.mesh import jax_devices
from replicator.controller.islands.in_process import described
from replicator.controller.islands.server import IslandService
from replicator.distributed.child import received_order
from replicator.distributed.initialize import initialize
from replicator.rpc.security.secret import FILE_VARIABLE
from replicator.rpc.server.server import Server


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandGroup:
    """The processes of an island that has several, to one of them.

    Attributes:
      coordinator: Where the first of them listens, on this host.
      secret: File of the secret by which they know each other.
      count: Number of processes.
      number: Number of this one.
    """

    coordinator: str
    secret: str
    count: int
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandSettings:
    """What the process of an island is told first.

    Attributes:
      devices: Number of its CPU devices.
      share: Number of devices of all islands of this host, which share its memory.
      folder: Private folder of its socket.
      group: Which other processes have its island, if any.
    """

    devices: int
    share: int
    folder: str
    group: IslandGroup | None = None


def main() -> None:
    """Serve an island until the standard input ends."""
    # What an op prints must not come between: it goes where errors go.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore
    settings: IslandSettings = received_order()
    fake_devices(settings.devices)
    if settings.group is not None:
        _join(settings.group)
    devices = [described(device, settings.share) for device in jax_devices()]
    service = IslandService(devices, takes_recipes=True)
    address = f"unix:{os.path.join(settings.folder, 'island')}"
    with Server(service, address=address, name="island") as server:
        print(json.dumps(server.address), file=output, flush=True)
        try:
            while True:
                service.take_recipe(*received_order())
        except EOFError:
            os._exit(0)  # ops may still run, and nobody wants them


def _join(group: IslandGroup) -> None:
    """Join the other processes of the island; what the user set stays as it is."""
    was = os.environ.get(FILE_VARIABLE)
    os.environ[FILE_VARIABLE] = group.secret
    initialize(group.coordinator, group.count, group.number)
    del os.environ[FILE_VARIABLE]
    if was is not None:
        os.environ[FILE_VARIABLE] = was
