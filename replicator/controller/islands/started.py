"""Start islands as processes of this host, which none of them outlives."""

import contextlib
import json
import select
import threading
import time
from pathlib import Path

from replicator.controller.islands.island_process import IslandSettings
from replicator.controller.islands.joined import joined_islands
from replicator.controller.islands.protocol import Report
from replicator.controller.islands.remote import RemoteIsland
from replicator.distributed.child import import_path, pickled, send, started_child
from replicator.distributed.processes.exits import describe_code
from replicator.errors import LaunchError

_START_S = 300.0
_PIPE_S = 60.0
_MODULE = "replicator.controller.islands.island_process"


class StartedIsland:
    """The process of an island, and the pipe to it.

    Args:
      devices: Number of its devices.
      share: Number of devices of all islands.
    """

    def __init__(self, devices: int, share: int) -> None:
        self._stack = contextlib.ExitStack()
        self._sending = threading.Lock()  # a recipe goes whole
        self._ending = threading.Lock()  # guards `_how`
        self._how: str | None = None
        child = started_child(_MODULE, {"JAX_PLATFORMS": "cpu"}, stderr=2)
        self._process, self._messages = self._stack.enter_context(child)
        folder = str(Path(self._messages.name).parent)
        settings = IslandSettings(devices=devices, share=share, folder=folder)
        until_s = time.monotonic() + _START_S
        send(self._process, import_path() + pickled(settings), until_s)

    def address(self) -> str:
        """Wait until it serves; return where.

        Raises:
          LaunchError: It has ended, or does not start in time.
        """
        assert self._process.stdout is not None, "a pipe"
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if poll.poll(_START_S * 1e3) else b""
        if not line:
            raise LaunchError(
                f"an island could not be started: it {self.end(_START_S)}. Read what "
                "it printed, above."
            )
        return json.loads(line)

    def send_recipe(self, number: int, recipe: bytes) -> None:
        """Send a recipe over the pipe."""
        with self._sending:
            until_s = time.monotonic() + _PIPE_S
            send(self._process, pickled((number, recipe)), until_s)

    def end(self, wait_s: float = 0.0) -> str:
        """End it; return how it ended by itself, or "" if this ended it.

        Args:
          wait_s: How long it may take to end by itself.
        """
        with self._ending:
            if self._how is None:
                poll = select.poll()
                poll.register(self._process.exited, select.POLLIN)
                has_ended = bool(poll.poll(wait_s * 1e3))
                code = self._process.close()
                out_of_memory = self._process.out_of_memory
                how = describe_code(code, out_of_memory=out_of_memory)
                self._how = how if has_ended else ""
                self._stack.close()
            return self._how


def started_islands(
    islands: int, devices: int, *, lost_after_s: float, report: Report
) -> dict[str, RemoteIsland]:
    """Start islands, each in a process of its own.

    Args:
      islands: Number of islands.
      devices: Number of CPU devices of each.
      lost_after_s: Silence after which an island is lost.
      report: Called when a value is computed, or cannot be.

    Raises:
      LaunchError: One cannot be started.
    """
    parents: list[StartedIsland] = []
    try:
        for _ in range(islands):
            parents.append(StartedIsland(devices, islands * devices))
        addresses = [parent.address() for parent in parents]
        return joined_islands(
            addresses, parents, lost_after_s=lost_after_s, report=report
        )
    except BaseException:
        for parent in parents:
            parent.end()
        raise
