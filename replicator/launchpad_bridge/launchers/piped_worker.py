"""A worker behind any command that passes on input and output: `srun`, a container.

    launcher ── "stop"; the end of it: die ──> standard input of the command
    launcher <── the result, or the error ──── its standard output

What the node prints goes to standard error, and so to the worker's log. The recipe lies
in the run's folder: the command must run where that can be read. When the launcher dies
its end of the pipe closes, and the worker ends itself, wherever it is.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.errors import DecodeError, LaunchError
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.launchers import worker_end
from replicator.launchpad_bridge.launchers.forked.control_frames import Message
from replicator.launchpad_bridge.launchers.forked.fork_server_client import (
    interpreter_flags,
)
from replicator.launchpad_bridge.launchers.forked.worker_logs import (
    begin_attempt,
    last_lines,
    log_paths,
    open_log,
)
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.registered_classes import (
    WithRegisteredClasses,
)
from replicator.launchpad_bridge.launchers.worker_process import main as run_told
from replicator.launchpad_bridge.launchers.worker_reports import (
    STOP,
    Frame,
    FrameReader,
)
from replicator.launchpad_bridge.protocols import Executable, Exited, Plan, StopAsked
from replicator.launchpad_bridge.run_folder import what_stays
from replicator.rpc.security.private_files import create_private

_READ_BYTES = 1 << 20
_START = """
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told["surroundings"]["path"]
from replicator.launchpad_bridge.launchers.piped_worker import main
sys.exit(main(told))
"""


@final
class PipedWorker:
    """One start of an executable, as the last words of a command; a `Worker`."""

    def __init__(
        self,
        command: Sequence[str],
        executable: Executable,
        attempt: int,
        *,
        plan: Plan,
        launch_type: str,
        report: Callable[[Exited | StopAsked], None],
    ) -> None:
        """Start it.

        Args:
          command: Runs the words that are put behind it, at the worker's place; such as
            `["srun", "--ntasks=1"]`. It gets the group's environment variables.
          executable: What the worker runs.
          attempt: Which start this is.
          plan: Of the run.
          launch_type: The launcher's name.
          report: Of the launcher; is told of the worker's end, once.

        Raises:
          LaunchError: The node does not pickle, or the command cannot be run.
        """
        self._executable = executable
        self._attempt = attempt
        self._report = report
        self._is_killed = False
        # Of standard input, which the driver's thread and the listening one may close.
        self._sending = threading.Lock()
        self._log = _log_of(plan, executable)
        self._log_start = begin_attempt(self._log, attempt)
        told = _told(plan, executable, attempt, launch_type)
        python = [sys.executable, *interpreter_flags(), "-P", "-c", _START]
        self._process = self._started([*command, *python, json.dumps(told)], plan)
        self._thread = threading.Thread(
            target=self._listen, name=f"worker {executable.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Set the node's stop event; returns at once."""
        self._send(STOP)

    def kill(self) -> None:
        """End the worker and the command; returns at once."""
        self._is_killed = True
        self._hang_up()
        self._process.end()

    def close(self, timeout_s: float = 5.0) -> None:
        """Kill what still runs, and wait until that is reported."""
        if self._thread.is_alive():
            self.kill()
        self._thread.join(timeout_s)
        self._hang_up()

    def _started(self, words: Sequence[str], plan: Plan) -> GuardedProcess:
        environment = {**os.environ, **self._executable.resources.env}
        if shutil.which(words[0], path=environment.get("PATH")) is None:
            raise LaunchError(
                f"`{self._executable.name}` must be started by a command that can be "
                f"run, got {words[0]!r}. Install it."
            )
        with os.fdopen(open_log(self._log), "ab") as log:
            try:
                return GuardedProcess(
                    words,
                    owner=plan.run_id,
                    environ=environment,
                    folder=plan.folder,
                    keep=what_stays(plan.folder, plan.logs),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            except OSError as error:
                raise LaunchError(
                    f"`{self._executable.name}` cannot be started: {error}."
                ) from error

    def _send(self, word: bytes) -> None:
        assert self._process.stdin is not None, "a pipe"
        # A worker that has ended needs no words.
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(word)

    def _hang_up(self) -> None:
        assert self._process.stdin is not None, "a pipe"
        with self._sending, contextlib.suppress(OSError):
            self._process.stdin.close()

    def _listen(self) -> None:
        said, heard = self._heard()
        self._report(
            worker_end.exited(
                self._executable.name,
                self._attempt,
                said=said,
                heard=heard,
                lines=last_lines(
                    self._log,
                    self._log_start,
                    said.log_bytes if said and said.raised else None,
                ),
                log=str(self._log),
            )
        )

    def _heard(self) -> tuple[Frame | None, Message]:
        """Read until the command has ended; return its last word, and how that was."""
        assert self._process.stdout is not None, "a pipe"
        reader, said, wrong = FrameReader(), None, {}
        with self._process.stdout as pipe:
            try:
                while data := os.read(pipe.fileno(), _READ_BYTES):
                    for frame in reader.feed(data):
                        if frame.asks:
                            self._report(StopAsked(by=self._executable.name))
                        else:
                            said = frame
            except DecodeError as error:
                wrong = {"reason": f"sent what is no report: {error}"}
                self.kill()
        code = self._process.wait()
        heard = {
            "pid": self._process.pid,
            "code": code,
            "is_killed": self._is_killed,
            "out_of_memory": False,
        }
        return said, {**heard, **wrong}


def main(told: Mapping[str, Any]) -> int:
    """Run a worker whose launcher is at the other end of input and output.

    Args:
      told: `job` without a channel, `surroundings` and `own_environment`.

    Returns:
      The code to exit with.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # what ends this worker ends what it started, and no more
    orders, reports = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    here, there = socket.socketpair()
    threading.Thread(
        target=_pass_orders, args=(orders, here), name="orders", daemon=True
    ).start()
    passing = threading.Thread(
        target=_pass_reports, args=(here, reports), name="reports", daemon=True
    )
    passing.start()
    try:
        return run_told({**told, "job": {**told["job"], "channel": there.detach()}})
    finally:
        passing.join()


def _pass_orders(orders: int, channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(orders, 16):
            channel.sendall(data)
        # The worker sees the end of its channel, and dies.
        channel.shutdown(socket.SHUT_WR)


def _pass_reports(channel: socket.socket, reports: int) -> None:
    with contextlib.suppress(OSError), open(reports, "wb", buffering=0) as pipe:
        while data := channel.recv(_READ_BYTES):
            left = memoryview(data)
            while left:
                left = left[pipe.write(left) or 0 :]


def _told(
    plan: Plan, executable: Executable, attempt: int, launch_type: str
) -> dict[str, Any]:
    run = WithRegisteredClasses(executable.run)
    data = recipes.pack(dataclasses.replace(executable, run=run))
    number = [each.name for each in plan.executables].index(executable.name)
    recipe = plan.folder / f"recipe-{number}-{attempt}"
    with os.fdopen(create_private(recipe), "wb") as file:
        file.write(data)
    job = {
        "program": plan.program,
        "worker": executable.name,
        "launch_type": launch_type,
        "recipe": str(recipe),
        "jax_settings": {},
        "attempt": attempt,
        "book": None,
    }
    return {
        "job": job,
        "surroundings": dataclasses.asdict(read_surroundings()),
        "own_environment": sorted(executable.resources.env),
    }


def _log_of(plan: Plan, executable: Executable) -> Path:
    plan.logs.mkdir(parents=True, exist_ok=True)
    return log_paths(plan.logs, [each.name for each in plan.executables])[
        executable.name
    ]
