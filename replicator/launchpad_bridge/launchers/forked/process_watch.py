"""Start workers by fork servers, and turn what is heard of them into events of the run.

One thread waits for all that can come: words of fork servers (a worker has started, has
exited), words of workers (a result, an error, a wish to stop). Each end is reported
once.
"""

import contextlib
import dataclasses
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from replicator.errors import DecodeError, LaunchError
from replicator.launchpad_bridge.launchers import worker_end
from replicator.launchpad_bridge.launchers.forked.control_frames import Message
from replicator.launchpad_bridge.launchers.forked.fork_server_client import (
    READY_S,
    ForkServer,
)
from replicator.launchpad_bridge.launchers.worker_logs import (
    begin_attempt,
    last_lines,
)
from replicator.launchpad_bridge.launchers.worker_process import Job
from replicator.launchpad_bridge.launchers.worker_reports import (
    STOP,
    Frame,
    FrameReader,
)
from replicator.launchpad_bridge.protocols import Exited, StopAsked

_LOG = logging.getLogger(__name__)
_JOIN_S = 5.0
_READ_BYTES = 1 << 20

Kind = tuple[tuple[str, str], ...]
"""What tells fork servers apart: the environment variables that their workers share."""

OpenServer = Callable[[Kind, bool], ForkServer]
"""Starts the fork server of a kind, one that forks or one of fresh interpreters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """How one worker is to be started.

    Attributes:
      kind: Of fork server.
      job: What it has to do.
      cores: The only ones it may use; empty for all.
      log: Where its output goes.
    """

    kind: Kind
    job: Job
    cores: Sequence[int]
    log: Path


class StartedWorker:
    """One start of a worker; the launcher's side of it."""

    def __init__(self, spec: Spec, number: int, watch: "ProcessWatch") -> None:
        self.spec = spec
        self.number = number
        self._log_start = begin_attempt(spec.log, spec.job.attempt)
        self.channel, self.theirs = socket.socketpair()
        self.channel.setblocking(False)
        self.reader = FrameReader()
        self.said: Frame | None = None
        self.pid: int | None = None
        self._watch = watch

    @property
    def name(self) -> str:
        """Return the worker's name."""
        return self.spec.job.worker

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        with contextlib.suppress(OSError):
            self.channel.send(STOP)

    def kill(self) -> None:
        """End it and all that it started; returns at once."""
        self._watch.kill(self)

    def read(self) -> list[Frame] | None:
        """Return what it has said since; None once it says no more.

        Raises:
          DecodeError: It said what is no report.
          BlockingIOError: It says nothing now.
        """
        try:
            data = self.channel.recv(_READ_BYTES)
        except ConnectionError:
            return None
        return self.reader.feed(data) if data else None

    def exited(self, heard: Message) -> Exited:
        """Return how it ended.

        Args:
          heard: What its fork server said of that.
        """
        # Its last lines are those from before its traceback, which it tells itself.
        end = self.said.log_bytes if self.said and self.said.raised else None
        return worker_end.exited(
            self.name,
            self.spec.job.attempt,
            said=self.said,
            heard={**heard, "pid": self.pid},
            lines=last_lines(self.spec.log, self._log_start, end),
            log=str(self.spec.log),
        )

    def close(self) -> None:
        """Close both ends."""
        self.channel.close()
        self.theirs.close()


class ProcessWatch:
    """Workers of one run, and the thread that watches them.

    Args:
      open_server: Starts fork servers.
      report: Takes the end of each worker, and the wishes to stop the run; called in
        the watching thread.
      forks: Whether fork servers fork at first.
    """

    def __init__(
        self,
        open_server: OpenServer,
        *,
        report: Callable[[Exited | StopAsked], None],
        forks: bool,
    ) -> None:
        self._open_server = open_server
        self._report = report
        self._forks = forks
        # Of all that follows; sockets are written to while it is held, so that a kill
        # cannot overtake the start that it is about.
        # Not of `_tasks`, which any thread appends to and one takes from, nor of the
        # selector, which is that thread's. Re-entrant: `start` calls `prepare`.
        self._lock = threading.RLock()
        self._servers: dict[Kind, ForkServer] = {}
        self._workers: dict[int, StartedWorker] = {}
        self._numbers = itertools.count()
        self._is_closing = False
        self._tasks: deque[Callable[[], None]] = deque()
        self._inbox, self._outbox = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._inbox, self._outbox):
            each.setblocking(False)
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name="process watch", daemon=True
        )
        self._thread.start()

    def prepare(self, kind: Kind) -> None:
        """Have a fork server of a kind; it gets ready by itself.

        Raises:
          LaunchError: It cannot be started.
        """
        with self._lock:
            if kind not in self._servers:
                server = self._servers[kind] = self._open_server(kind, self._forks)
                self._do(lambda: self._register(server, server))

    def start(self, spec: Spec) -> StartedWorker:
        """Start a worker; returns when it is on its way.

        Raises:
          LaunchError: It cannot be started.
        """
        with self._lock:
            self.prepare(spec.kind)
            server = self._servers[spec.kind]
            if server.lost is not None or self._is_closing:
                why = server.lost or "the run is over"
                raise LaunchError(f"`{spec.job.worker}` cannot be started: {why}.")
            try:
                worker = StartedWorker(spec, next(self._numbers), self)
            except OSError as error:
                raise LaunchError(
                    f"`{spec.job.worker}` cannot be started: {error}."
                ) from error
            self._workers[worker.number] = worker
            self._do(lambda: self._register(worker.channel, worker))
            server.waiting.append(worker)
            self._start_waiting(server)
        return worker

    def kill(self, worker: StartedWorker) -> None:
        """End a worker, wherever it is on its way."""
        with self._lock:
            if worker.number not in self._workers:
                return
            server = self._servers[worker.spec.kind]
            if worker not in server.waiting:
                server.kill(worker.number)
                return
            server.waiting.remove(worker)
        self._do(lambda: self._finish(worker, {"reason": "was killed before it ran"}))

    def close(self) -> None:
        """End all workers and their fork servers, and the thread."""
        with self._lock:
            self._is_closing = True
        self._do(lambda: None)
        self._thread.join(_JOIN_S)
        # Not before: that thread may have replaced one meanwhile.
        for server in list(self._servers.values()):
            server.close()
        for worker in list(self._workers.values()):
            self._finish(worker, {"reason": "was killed at the end of the run"})
        self._selector.close()
        self._inbox.close()
        self._outbox.close()

    def _do(self, task: Callable[[], None]) -> None:
        """Have the watching thread do something; the selector is its own."""
        self._tasks.append(task)
        with contextlib.suppress(OSError):
            self._outbox.send(b"x")

    def _run(self) -> None:
        while True:
            ready = self._selector.select(self._left_s())
            with contextlib.suppress(BlockingIOError):
                self._inbox.recv(4096)
            # After the byte was read: whoever appends later sends another one.
            while self._tasks:
                self._tasks.popleft()()
            if self._is_closing:
                return
            # What a worker said came before its end.
            for key, _ in ready:
                if isinstance(key.data, StartedWorker):
                    self._hear(key.data)
            for key, _ in ready:
                if isinstance(key.data, ForkServer):
                    self._listen(key.data)
            self._replace_late()

    def _left_s(self) -> float | None:
        with self._lock:
            dues = [s.ready_until_s for s in self._servers.values() if s.ready_until_s]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _register(
        self, source: socket.socket | ForkServer, data: StartedWorker | ForkServer
    ) -> None:
        if source.fileno() >= 0:  # not closed meanwhile
            self._selector.register(source, selectors.EVENT_READ, data)

    def _unregister(self, source: socket.socket | ForkServer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _hear(self, worker: StartedWorker) -> None:
        """Take in one piece of what a worker says."""
        with contextlib.suppress(BlockingIOError):
            if not self._take(worker):
                self._unregister(worker.channel)

    def _take(self, worker: StartedWorker) -> bool:
        try:
            frames = worker.read()
        except DecodeError as error:
            _LOG.warning("`%s` sent what is no report: %s", worker.name, error)
            self.kill(worker)
            return False
        for frame in frames or ():
            if frame.asks:
                self._report(StopAsked(by=worker.name, of=frame.asks))
            else:
                worker.said = frame
        return frames is not None

    def _listen(self, server: ForkServer) -> None:
        """Obey what a fork server says."""
        messages = server.receive()
        if messages is None:
            self._lose(server, "its fork server has ended")
            return
        for message in messages:
            if "ready" in message:
                with self._lock:
                    server.ready_until_s = None
                    self._start_waiting(server)
            elif "unfit" in message:
                self._replace(server, message["unfit"])
                return
            elif "started" in message:
                self._workers[message["started"]].pid = message["pid"]
            elif "failed" in message:
                worker = self._workers[message["failed"]]
                self._finish(worker, {"reason": f"cannot fork: {message['reason']}"})
            else:
                self._finish(self._workers[message["exited"]], message)

    def _start_waiting(self, server: ForkServer) -> None:
        if server.ready_until_s is not None:
            return
        while server.waiting:
            worker = server.waiting.pop(0)
            told = {
                "id": worker.number,
                "job": dataclasses.asdict(worker.spec.job),
                "cores": list(worker.spec.cores),
                "log": str(worker.spec.log),
            }
            # A fork server that is gone is noticed by whoever listens to it.
            with contextlib.suppress(OSError):
                server.start(told, worker.theirs)
            worker.theirs.close()

    def _replace_late(self) -> None:
        for server in list(self._servers.values()):
            due_s = server.ready_until_s
            if due_s is not None and time.monotonic() >= due_s:
                self._replace(server, f"its imports take more than {READY_S:g} s")

    def _replace(self, server: ForkServer, reason: str) -> None:
        """Go on with fresh interpreters, where nothing has to be forked."""
        # Without the lock, as `close` may wait for the guard. Nobody sends meanwhile:
        # `ready_until_s` is still set.
        self._unregister(server)
        server.close()
        if not server.order.forks:
            self._lose(server, reason)
            return
        _LOG.warning(
            "Workers cannot be forked, as %s. Each starts a fresh interpreter instead, "
            "which takes longer.",
            reason,
        )
        with self._lock:
            self._forks = False
            (kind,) = (k for k, each in self._servers.items() if each is server)
            try:
                fresh = self._open_server(kind, False)
            except LaunchError as error:
                self._lose(server, str(error))
                return
            fresh.waiting = server.waiting
            self._servers[kind] = fresh
        self._register(fresh, fresh)

    def _lose(self, server: ForkServer, reason: str) -> None:
        """Report the end of all workers of a fork server that is gone."""
        self._unregister(server)
        said = server.last_words()
        server.close()
        reason = f"{reason}\n{said}" if said else reason
        with self._lock:
            server.lost = reason
            server.ready_until_s = None
            server.waiting.clear()
            mine = [
                worker
                for worker in self._workers.values()
                if self._servers[worker.spec.kind] is server
            ]
        for worker in mine:
            self._finish(worker, {"reason": f"is lost, as {reason}"})

    def _finish(self, worker: StartedWorker, heard: Message) -> None:
        """Report the end of a worker, with all that it has said."""
        with self._lock:
            # Taken out first: of all who learn of an end, one reports it.
            if self._workers.pop(worker.number, None) is None:
                return
        with contextlib.suppress(BlockingIOError):
            while self._take(worker):
                pass
        self._unregister(worker.channel)
        worker.close()
        self._report(worker.exited(heard))
