"""Start islands as processes of this host, which none of them outlives."""

import contextlib
import functools
import json
import os
import select
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from replicator.controller.islands.island_process import IslandGroup, IslandSettings
from replicator.controller.islands.joined import IslandAddress, JoinedIslands
from replicator.controller.islands.protocol import Island
from replicator.controller.islands.remote import IslandParent
from replicator.distributed.child import import_path, pickled, send, started_child
from replicator.distributed.processes.exits import describe_code
from replicator.distributed.processes.ports import free_port
from replicator.errors import LaunchError
from replicator.rpc.client.client import Client
from replicator.rpc.security.secret import Secret

_START_S = 300.0
_PIPE_S = 60.0
_MODULE = "replicator.controller.islands.island_process"


class StartedIsland:
    """A process of an island, and the pipe to it.

    Args:
      devices: Number of its devices.
      share: Number of devices of all islands.
      group: The group that it is one of, if its island has several.
    """

    def __init__(
        self, devices: int, share: int, group: IslandGroup | None = None
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._sending = threading.Lock()  # a recipe goes whole
        self._ending = threading.Lock()  # guards `_how`
        self._how: str | None = None
        child = started_child(_MODULE, {"JAX_PLATFORMS": "cpu"}, stderr=2)
        self._process, self._messages = self._stack.enter_context(child)
        folder = str(Path(self._messages.name).parent)
        settings = IslandSettings(
            devices=devices, share=share, folder=folder, group=group
        )
        until_s = time.monotonic() + _START_S
        send(self._process, import_path() + pickled(settings), until_s)

    @property
    def output(self) -> IO[bytes]:
        """Where it writes its address, once it serves."""
        assert self._process.stdout is not None, "a pipe"
        return self._process.stdout

    def address(self) -> str:
        """Return where it serves, when there is something to read.

        Raises:
          LaunchError: It has ended.
        """
        if not (line := self.output.readline()):
            raise LaunchError(
                f"an island could not be started: it {self.end(_PIPE_S)}. Read what "
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


class StartedGroup:
    """The processes of an island, which end together.

    Args:
      devices: Number of devices of each.
      share: Number of devices of all islands.
      count: Number of processes.
    """

    def __init__(self, devices: int, share: int, count: int) -> None:
        self.processes: list[StartedIsland] = []
        self._stack = contextlib.ExitStack()
        self._ending = threading.Lock()  # guards `_how`
        self._how: str | None = None
        groups: Sequence[IslandGroup | None] = [None]
        if count > 1:
            folder = tempfile.TemporaryDirectory(prefix="replicator-island-")
            secret = os.path.join(self._stack.enter_context(folder), "secret")
            Secret.generate().write(secret)
            at = f"127.0.0.1:{free_port()}"
            groups = [
                IslandGroup(coordinator=at, secret=secret, count=count, number=number)
                for number in range(count)
            ]
        try:
            for group in groups:
                self.processes.append(StartedIsland(devices, share, group))
        except BaseException:
            if self.processes:
                self.end()
            self._stack.close()
            raise

    @property
    def parents(self) -> Sequence[IslandParent]:
        """The processes, each of which ends all."""
        if len(self.processes) == 1:
            return self.processes
        return [_StartedMember(self, number) for number in range(len(self.processes))]

    def addresses(self) -> list[IslandAddress]:
        """Wait until all serve; return where each does.

        Raises:
          LaunchError: One has ended, or does not start in time.
        """
        found, poll = [""] * len(self.processes), select.poll()
        # Of a group none serves before all have started, so any of them may end first.
        left = {each.output.fileno(): n for n, each in enumerate(self.processes)}
        for file in left:
            poll.register(file, select.POLLIN)
        until_s = time.monotonic() + _START_S
        while left:
            ready = poll.poll(max(until_s - time.monotonic(), 0.0) * 1e3)
            if not ready:
                raise LaunchError(
                    f"an island could not be started: it did not serve within "
                    f"{_START_S:g} s. Read what it printed, above."
                )
            for file, _ in ready:
                poll.unregister(file)
                number = left.pop(file)
                found[number] = self.processes[number].address()
        return [
            IslandAddress(text=each, client=functools.partial(Client, each))
            for each in found
        ]

    def end(self, number: int = 0, wait_s: float = 0.0) -> str:
        """End all; return which ended by themselves and how, or "".

        Args:
          number: The process that is ended first.
          wait_s: How long it may take to end by itself.
        """
        with self._ending:
            if self._how is None:
                # The others end by themselves where the first process of a group is
                # gone, with noise: it is the last.
                rest = [n for n in range(len(self.processes)) if n != number]
                hows = {number: self.processes[number].end(wait_s)}
                hows |= {n: self.processes[n].end() for n in reversed(rest)}
                ends = [
                    f"process {n}, which {hows[n]}" for n in sorted(hows) if hows[n]
                ]
                self._how = f"lost {' and '.join(ends)}" if ends else ""
                self._stack.close()
            return self._how


class _StartedMember:
    """A process of an island of several."""

    def __init__(self, group: StartedGroup, number: int) -> None:
        self._group = group
        self._number = number

    def send_recipe(self, number: int, recipe: bytes) -> None:
        """Send a recipe over the pipe."""
        self._group.processes[self._number].send_recipe(number, recipe)

    def end(self, wait_s: float = 0.0) -> str:
        """End the island; return how by itself, or "" if this ended it."""
        return self._group.end(self._number, wait_s)


class StartedIslands:
    """Starts processes of this host, as islands of a session.

    Args:
      devices: Number of CPU devices of each.
      processes: Number of processes of each, which share its devices.
      share: Number of devices of all islands.
      joined: The session.
    """

    def __init__(
        self, devices: int, processes: int, *, share: int, joined: JoinedIslands
    ) -> None:
        self._group = devices // processes, share, processes
        self._joined = joined
        self._started: list[StartedGroup] = []  # that have not joined
        self._is_stopped = False

    def start(self, count: int) -> None:
        """Start islands, and have them join.

        Raises:
          LaunchError: One cannot be started.
        """
        try:
            for _ in range(count):
                self._started.append(StartedGroup(*self._group))
            if self._is_stopped:
                self.stop()
            self._joined.join(
                [each.addresses() for each in self._started],
                [at.parents for at in self._started],
            )
            self._started = []
        except BaseException:
            for started in self._started:
                started.end()
            raise

    def another(self) -> Island:
        """Start one more.

        Raises:
          LaunchError: It cannot be started.
        """
        self.start(1)
        return next(reversed(self._joined.islands.values()))

    def stop(self) -> None:
        """End what is being started, in another thread too; returns at once."""
        self._is_stopped = True
        for started in list(self._started):
            for process in started.processes:
                process.stop()
