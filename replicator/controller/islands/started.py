"""Start islands as processes of this host, which none of them outlives."""

import contextlib
import json
import select
import threading
import time
from pathlib import Path

from replicator.controller.islands.island_process import IslandSettings
from replicator.controller.islands.joined import JoinedIslands
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

    def stop(self) -> None:
        """Have it end; returns at once."""
        self._process.end()

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


class StartedIslands:
    """Starts processes of this host, each an island of a session.

    Args:
      devices: Number of CPU devices of each.
      share: Number of devices of all islands.
      joined: The session.
    """

    def __init__(self, devices: int, share: int, joined: JoinedIslands) -> None:
        self._devices = devices
        self._share = share
        self._joined = joined
        self._parents: list[StartedIsland] = []  # that have not joined
        self._is_stopped = False

    def start(self, count: int) -> None:
        """Start islands, and have them join.

        Raises:
          LaunchError: One cannot be started.
        """
        try:
            for _ in range(count):
                self._parents.append(StartedIsland(self._devices, self._share))
            if self._is_stopped:
                self.stop()
            addresses = [parent.address() for parent in self._parents]
            self._joined.join(addresses, self._parents)
            self._parents = []
        except BaseException:
            for parent in self._parents:
                parent.end()
            raise

    def another(self) -> RemoteIsland:
        """Start one more.

        Raises:
          LaunchError: It cannot be started.
        """
        self.start(1)
        return next(reversed(self._joined.islands.values()))

    def stop(self) -> None:
        """End what is being started, in another thread too; returns at once."""
        self._is_stopped = True
        for parent in list(self._parents):
            parent.stop()
