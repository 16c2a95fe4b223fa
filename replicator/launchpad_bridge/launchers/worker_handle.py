"""The launcher's handle of one start of a worker: stop it, kill it, report its end.

    launcher ── stop, kill ──> process ── reports ──> launcher

Processes are started in several ways: a fork (`forked/fork_server_client`), a command
with pipes (`piped_worker`), an actor of Ray (`on_ray/ray_cluster`). Each is a
`StartedProcess`; all else is the same for all of them.
"""

import dataclasses
import threading
from typing import Protocol

from replicator.errors import DecodeError
from replicator.launchpad_bridge.launchers.worker_end import ProcessExit, exited
from replicator.launchpad_bridge.launchers.worker_reports import ReportFrameReader
from replicator.launchpad_bridge.protocols import Report, StopAsked

_JOIN_S = 5.0


class StartedProcess(Protocol):
    """A process that runs one worker."""

    def read(self) -> bytes:
        """Wait for bytes of its reports; return none once there are no more."""
        ...

    def stop(self) -> None:
        """Ask it to stop; returns at once."""

    def kill(self) -> None:
        """End it and all that it started; returns at once."""

    def wait(self, log_end: int | None) -> ProcessExit:
        """Wait until it has exited; return how.

        Args:
          log_end: Size of its log, in bytes, before its traceback; None for no such.
        """
        ...

    def close(self) -> None:
        """Free what belongs to this start, once it has exited."""


class WorkerHandle:
    """A started worker; a `Worker`.

    Args:
      name: Name of the worker.
      attempt: Number of this start, from 0.
      process: The process that runs it.
      report: Takes its requests to stop and, once, its end; called in a thread of this
        handle.
    """

    def __init__(
        self,
        name: str,
        attempt: int,
        process: StartedProcess,
        report: Report,
    ) -> None:
        self.name = name
        self.attempt = attempt
        self.process = process
        self._report = report
        # One thread for each start: it alone reads from the process, waits for its exit
        # and reports; `stop` and `kill` come from the driver's thread. It ends when the
        # process has: `close` kills and joins. A daemon, as a process that cannot be
        # killed must not keep the launcher.
        self._thread = threading.Thread(
            target=self._watch, name=f"worker {name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Set the node's stop event; returns at once."""
        self.process.stop()

    def kill(self) -> None:
        """End the worker and all that it started; returns at once."""
        self.process.kill()

    def close(self, timeout_s: float = _JOIN_S) -> None:
        """Kill what still runs, and wait until that is reported."""
        if self._thread.is_alive():
            self.kill()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        reader, last, wrong = ReportFrameReader(), None, ""
        try:
            while data := self.process.read():
                for frame in reader.feed(data):
                    if frame.asks:
                        # Before its end is reported, as it was asked before.
                        self._report(StopAsked(by=self.name, of=frame.asks))
                    else:
                        last = frame
        except DecodeError as error:
            # Nothing after it can be read: lengths are in the stream itself.
            wrong = f"sent what is no report: {error}"
            self.process.kill()
        # The traceback is in the report: the last lines are those before it.
        end = self.process.wait(last.log_bytes if last and last.raised else None)
        end = dataclasses.replace(end, reason=wrong or end.reason)
        # Before the report: a new attempt may start as soon as that is out.
        self.process.close()
        self._report(exited(self.name, self.attempt, last=last, end=end))
