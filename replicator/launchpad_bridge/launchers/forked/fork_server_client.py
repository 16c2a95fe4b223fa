"""A launcher's side of a fork server: start it, talk with it, end it."""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.errors import LaunchError
from replicator.launchpad_bridge.launchers.forked.control_frames import (
    Message,
    Receiver,
    send,
)
from replicator.launchpad_bridge.launchers.launcher_environment import (
    LauncherEnvironment,
)
from replicator.launchpad_bridge.launchers.worker_logs import (
    last_lines,
    open_log,
)
from replicator.launchpad_bridge.launchers.worker_process import interpreter_flags
from replicator.launchpad_bridge.run_folder import what_stays

_START = """
import gc, json, sys
gc.disable()  # imports are faster; `preload` puts it on again
sys.path[:] = json.loads(sys.argv[1])
from replicator.launchpad_bridge.launchers.forked.fork_server import main
sys.exit(main(control=0))
"""
_SEND_S = 10.0
READY_S = 120.0
"""How long a fork server may import."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a fork server shall be.

    Attributes:
      run_id: Of the run.
      forks: Whether it imports `modules` and forks workers; otherwise each is a fresh
        interpreter.
      modules: What it imports.
      surroundings: Of the launcher.
      own_environment: Names of variables that its workers have of their own.
    """

    run_id: str
    forks: bool
    modules: Sequence[str]
    surroundings: LauncherEnvironment
    own_environment: Sequence[str]


class ForkServer:
    """A fork server that runs, and who waits until it is ready.

    Args:
      order: What it shall be.
      environment: Its whole environment, which its workers inherit.
      folder: Of the run; deleted if the launcher is gone, but for `logs`.
      logs: Where its own words are kept.

    Attributes:
      order: What it shall be.
      waiting: Workers to be started once it is ready.
      ready_until_s: When that has to be; None once it is.
      lost: Why it is gone; None while it is there.

    Raises:
      LaunchError: It cannot be started.
    """

    def __init__(
        self,
        order: Order,
        *,
        environment: Mapping[str, str],
        folder: Path,
        logs: Path,
    ) -> None:
        self.order = order
        # `ProcessWatch` reads and changes these, under its lock.
        self.waiting: list[Any] = []
        self.ready_until_s: float | None = time.monotonic() + READY_S
        self.lost: str | None = None
        self._log = logs / "fork-server.log"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        # `ProcessWatch` sends under its lock, so frames do not mix; its thread alone
        # receives.
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_SEND_S)
        self._receiver = Receiver(self._control)
        # -P: the folder of a program is no place to import from.
        python = [sys.executable, *interpreter_flags(), "-P", "-c", _START]
        log = open_log(self._log)
        try:
            with theirs, os.fdopen(log, "ab") as file:
                # A copy of the socket here would hide the end of the fork server.
                self._process = GuardedProcess(
                    [*python, json.dumps(list(sys.path))],
                    owner=order.run_id,
                    environ=environment,
                    folder=folder,
                    keep=what_stays(folder, logs),
                    stdin=theirs.fileno(),
                    stdout=file,
                    stderr=file,
                )
        except OSError as error:
            self._control.close()
            raise LaunchError(
                f"No process for workers can be started: {error}."
            ) from error
        # If it is gone already, `receive` says so.
        with contextlib.suppress(OSError):
            send(self._control, dataclasses.asdict(order))

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._control.fileno()

    def receive(self) -> list[Message] | None:
        """Return what it says, None once it is gone."""
        return self._receiver.receive()

    def start(self, told: Message, channel: socket.socket) -> None:
        """Have a worker started that has the other end of a channel.

        Raises:
          OSError: The fork server is gone.
        """
        send(self._control, {"start": told}, [channel.fileno()])

    def kill(self, worker_id: int) -> None:
        """Have a worker killed; nothing happens if either is gone."""
        with contextlib.suppress(OSError):
            send(self._control, {"kill": worker_id})

    def last_words(self) -> str:
        """Return what it said itself before it ended."""
        return "\n".join(last_lines(self._log, self._log_start))

    def close(self) -> None:
        """End it, and all that is below it."""
        self._control.close()
        self._process.close()
