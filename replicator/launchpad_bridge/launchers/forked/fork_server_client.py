"""A launcher's side of a fork server: workers that it starts, watches and kills.

A thread for each fork server reads its messages: it is ready, a worker has started, a
worker has exited. The end of a worker is passed on once, however it is learned.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

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
from replicator.launchpad_bridge.launchers.worker_end import ProcessExit
from replicator.launchpad_bridge.launchers.worker_logs import (
    begin_attempt,
    last_lines,
    open_log,
)
from replicator.launchpad_bridge.launchers.worker_process import Job, interpreter_flags
from replicator.launchpad_bridge.launchers.worker_reports import STOP
from replicator.launchpad_bridge.run_folder import what_stays

_LOG = logging.getLogger(__name__)
_START = """
import gc, json, sys
gc.disable()  # imports are faster; `preload` puts it on again
sys.path[:] = json.loads(sys.argv[1])
from replicator.launchpad_bridge.launchers.forked.fork_server import main
sys.exit(main(control=0))
"""
_READY_S = 120.0  # for its imports
_SEND_S = 10.0
_JOIN_S = 5.0
_READ_BYTES = 1 << 20
_RUN_IS_OVER = "the run is over"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Properties of a fork server.

    Attributes:
      run_id: Id of the run.
      forks: Whether it imports `modules` and forks workers; otherwise each is a fresh
        interpreter.
      modules: Names of modules that it imports.
      surroundings: Environment of the launcher.
      own_environment: Names of variables that its workers have of their own.
    """

    run_id: str
    forks: bool
    modules: Sequence[str]
    surroundings: LauncherEnvironment
    own_environment: Sequence[str]


class ForkedProcess:
    """A `StartedProcess` that a fork server starts.

    Args:
      server: The fork server.
      number: Its number in messages to and from the fork server.
      job: Task of the worker.
      cores: The only ones that it may use; empty for all.
      log: File of its output.

    Attributes:
      pid: Process id; None before it has started.

    Raises:
      LaunchError: The log cannot be written.
      OSError: There is no socket for it.
    """

    def __init__(
        self,
        server: "ForkServer",
        number: int,
        *,
        job: Job,
        cores: Sequence[int],
        log: Path,
    ) -> None:
        self.number = number
        self.pid: int | None = None
        self._server = server
        self._order = {
            "id": number,
            "job": dataclasses.asdict(job),
            "cores": list(cores),
            "log": str(log),
        }
        # Size of the log before this attempt: lines of others are not its last ones.
        self._log, self._log_start = log, begin_attempt(log, job.attempt)
        # The worker gets the other end, and only it: when it dies, `read` finds the end
        # of the stream. If this launcher dies, the worker finds that, and ends.
        self._channel, self._theirs = socket.socketpair()
        # Set once: `ForkServer._end` lets one thread of several come here.
        self._exit: Future[ProcessExit] = Future()

    def start(self, control: socket.socket) -> None:
        """Have the fork server start it; its lock is held."""
        # If the fork server is gone, the thread that reads from it finds that out.
        with contextlib.suppress(OSError):
            send(control, {"start": self._order}, [self._theirs.fileno()])
        self._theirs.close()

    def end(self, end: ProcessExit) -> None:
        """Take how it has exited."""
        self._theirs.close()
        # `read` returns what has arrived, then nothing, even if a process that the
        # worker left behind holds a copy of the other end.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RD)
        self._exit.set_result(end)

    def read(self) -> bytes:
        """Wait for bytes of its reports; return none once there are no more."""
        try:
            return self._channel.recv(_READ_BYTES)
        except ConnectionError:
            return b""

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        # One byte. If the worker reads so little that even that has no room, it has
        # many requests to stop already.
        with contextlib.suppress(OSError):
            self._channel.send(STOP, socket.MSG_DONTWAIT)

    def kill(self) -> None:
        """End it and all that it started; returns at once."""
        self._server.kill(self)

    def wait(self, log_end: int | None) -> ProcessExit:
        """Wait until it has exited; return how."""
        # Has a bound: the end of the fork server, by `ForkServer.close` at the latest,
        # is the end of all its workers.
        return dataclasses.replace(
            self._exit.result(),
            pid=self.pid,
            lines=last_lines(self._log, self._log_start, log_end),
            log=str(self._log),
        )

    def close(self) -> None:
        """Close the channel to it."""
        self._channel.close()


class ForkServer:
    """A fork server and the workers that it starts, now or once it is ready.

    Args:
      order: Properties of the fork server.
      environment: Its whole environment, which its workers inherit.
      folder: Folder of the run; deleted if the launcher is gone, but for `logs`.
      logs: Folder of its own output.

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
        self._order = order
        self._environment = environment
        self._folder = folder
        self._logs = logs
        self._log = logs / "fork-server.log"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._numbers = itertools.count()
        # Guards all that follows but `_receiver`, which is `_thread`'s. Messages are
        # sent while it is held, so that they do not mix, and the kill of a worker
        # cannot overtake its start.
        self._lock = threading.Lock()
        self._workers: dict[int, ForkedProcess] = {}
        self._waiting: list[ForkedProcess] = []
        self._is_ready = False
        # Why no worker can be started any more; set once, and then nothing is begun.
        self._over = ""
        self._begin()
        # Ends when the fork server does, which `close` ends. A daemon, as a guard that
        # is stuck must not keep the launcher.
        self._thread = threading.Thread(
            target=self._listen, name="fork server", daemon=True
        )
        self._thread.start()

    def start(self, job: Job, *, cores: Sequence[int], log: Path) -> ForkedProcess:
        """Start a worker; returns when it is on its way.

        Args:
          job: Task of the worker.
          cores: The only ones that it may use; empty for all.
          log: File of its output.

        Raises:
          LaunchError: It cannot be started.
        """
        with self._lock:
            if self._over:
                raise LaunchError(f"`{job.worker}` cannot be started: {self._over}.")
            try:
                worker = ForkedProcess(
                    self, next(self._numbers), job=job, cores=cores, log=log
                )
            except OSError as error:
                raise LaunchError(
                    f"`{job.worker}` cannot be started: {error}."
                ) from error
            self._workers[worker.number] = worker
            # Until it is ready it imports and reads nothing: the socket might fill up
            # while this thread, the driver's, holds the lock.
            if self._is_ready:
                worker.start(self._control)
            else:
                self._waiting.append(worker)
        return worker

    def kill(self, worker: ForkedProcess) -> None:
        """Kill a worker, wherever it is on its way; do nothing if it has ended."""
        with self._lock:
            is_waiting = worker in self._waiting
            if is_waiting:
                self._waiting.remove(worker)
            elif worker.number in self._workers:
                with contextlib.suppress(OSError):  # the fork server is gone
                    send(self._control, {"kill": worker.number})
        # Outside of the lock, which `_end` takes as well.
        if is_waiting:
            self._end(worker.number, ProcessExit(reason="was killed before it ran"))

    def close(self) -> None:
        """End it, and all that is below it."""
        with self._lock:
            self._over = self._over or _RUN_IS_OVER
        # Not under the lock, as it may take seconds: nothing is begun any more. All
        # that descends from the fork server is dead when it returns.
        self._process.close()
        # It reads the end of the stream now, and ends what workers are left.
        self._thread.join(_JOIN_S)

    def _begin(self) -> None:
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
                    owner=self._order.run_id,
                    environ=self._environment,
                    folder=self._folder,
                    keep=what_stays(self._folder, self._logs),
                    stdin=theirs.fileno(),
                    stdout=file,
                    stderr=file,
                )
        except OSError as error:
            self._control.close()
            raise LaunchError(
                f"No process for workers can be started: {error}."
            ) from error
        # If it is gone already, so is its first message.
        with contextlib.suppress(OSError):
            send(self._control, dataclasses.asdict(self._order))

    def _listen(self) -> None:
        first = self._first_message()
        if "unfit" in first and self._order.forks:
            first = self._begin_afresh(first["unfit"])
        if "ready" in first:
            self._serve()
        self._lose(first.get("unfit", "its fork server has ended"))

    def _first_message(self) -> Message:
        """Return "ready", or "unfit" with a reason; nothing from one that is gone."""
        # Nobody sends meanwhile.
        self._control.settimeout(_READY_S)
        messages = self._receiver.receive()
        self._control.settimeout(_SEND_S)
        if messages is None:
            return {}
        late = {"unfit": f"its imports take more than {_READY_S:g} s"}
        return messages[0] if messages else late

    def _begin_afresh(self, reason: str) -> Message:
        """Go on with fresh interpreters, where nothing has to be forked."""
        # It has no workers: none was started before it was ready.
        self._process.close()
        self._control.close()
        _LOG.warning(
            "Workers cannot be forked, as %s. Each starts a fresh interpreter instead, "
            "which takes longer.",
            reason,
        )
        with self._lock:
            # Under the lock: `close` then finds the new one, or none is begun.
            if self._over:
                return {}
            self._order = dataclasses.replace(self._order, forks=False, modules=())
            try:
                self._begin()
            except LaunchError as error:
                return {"unfit": str(error)}
        return self._first_message()

    def _serve(self) -> None:
        """Take its messages until it is gone."""
        with self._lock:
            self._is_ready = True
            while self._waiting:
                self._waiting.pop(0).start(self._control)
        # The fork server sends without waiting and goes on reading. So a thread that
        # holds the lock and sends is not held up by this one, which may want the lock.
        while (messages := self._receiver.receive()) is not None:
            for message in messages:
                match message:
                    case {"started": number, "pid": pid}:
                        self._workers[number].pid = pid
                    case {"failed": number, "reason": reason}:
                        end = ProcessExit(reason=f"cannot fork: {reason}")
                        self._end(number, end)
                    case {"exited": number, **end}:
                        self._end(number, ProcessExit(**end))

    def _lose(self, reason: str) -> None:
        """End all workers of a fork server that is gone."""
        lines = last_lines(self._log, self._log_start)
        # Its workers die with it, by the kernel's signal to children of the dead; what
        # they had started is swept here.
        self._process.close()
        with self._lock:
            self._over = self._over or "\n".join([reason, *lines])
            self._waiting.clear()
            numbers = list(self._workers)
        is_closed = self._over == _RUN_IS_OVER
        text = f"is lost, as {self._over}"
        for number in numbers:
            reason = "was killed at the end of the run" if is_closed else text
            self._end(number, ProcessExit(reason=reason))
        self._control.close()

    def _end(self, number: int, end: ProcessExit) -> None:
        with self._lock:
            # Taken out first: of all threads that learn of an end, one passes it on.
            worker = self._workers.pop(number, None)
        if worker is not None:
            worker.end(end)
