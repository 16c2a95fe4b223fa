"""A worker behind any command that passes on input and output: `srun`, a container.

    launcher ── "stop"; the end of it: die ──> standard input of the command
    launcher <── the result, or the error ──── its standard output

What the node prints goes to standard error, and so to the worker's log. When the
launcher dies its end of the pipe closes, and the worker ends itself, wherever it is.
The recipe lies in the run's folder: the command must run where that can be read.
"""

import contextlib
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.errors import LaunchError
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.launchers import worker_logs
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.worker_end import ProcessExit
from replicator.launchpad_bridge.launchers.worker_handle import WorkerHandle
from replicator.launchpad_bridge.launchers.worker_process import Job, piped_interpreter
from replicator.launchpad_bridge.launchers.worker_reports import STOP
from replicator.launchpad_bridge.protocols import Executable, Plan, Report
from replicator.launchpad_bridge.run_folder import what_stays

_READ_BYTES = 1 << 20


class PipedProcess:
    """A `StartedProcess` behind a command that passes on input and output.

    Args:
      command: The command; its end runs `worker_process.main`.
      name: Name of the worker.
      attempt: Number of this start, from 0.
      log: File of its output.
      owner: As of a `GuardedProcess`; `environ`, `folder` and `keep` likewise.
      environ: See `owner`.
      folder: See `owner`.
      keep: See `owner`.

    Raises:
      LaunchError: The command cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        attempt: int,
        log: Path,
        owner: str,
        environ: Mapping[str, str],
        folder: Path,
        keep: Sequence[Path] = (),
    ) -> None:
        self._log = log
        self._log_start = worker_logs.begin_attempt(log, attempt)
        # Set by the thread that kills, before it does; the handle's thread reads it
        # once the process has ended. So a worker that died by itself at the same moment
        # may count as killed, but never the reverse.
        self._is_killed = False
        # Guards standard input: the driver's thread writes to it and closes it, the
        # handle's thread closes it. No other lock is taken while it is held.
        self._sending = threading.Lock()
        try:
            # Closed here at once: the worker writes to its own copy, also when this
            # launcher is dead.
            with os.fdopen(worker_logs.open_log(log), "ab") as file:
                self._process = GuardedProcess(
                    command,
                    owner=owner,
                    environ=environ,
                    folder=folder,
                    keep=keep,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                )
        except OSError as error:
            raise LaunchError(f"`{name}` cannot be started: {error}.") from error
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def read(self) -> bytes:
        """Wait for bytes of its reports; return none once there are no more."""
        return os.read(self._stdout.fileno(), _READ_BYTES)

    def has_more(self) -> bool:
        """Return whether more bytes have arrived, or arrive within a millisecond."""
        ready = select.poll()  # `select` takes no descriptors past 1,023
        ready.register(self._stdout, select.POLLIN)
        return bool(ready.poll(1))

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        # One byte fits into the pipe, so this does not wait for the worker. One that
        # has ended reads nothing more: the pipe is broken, or closed here.
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._stdin.write(STOP)

    def kill(self) -> None:
        """End the command and all that it started; returns at once."""
        self._is_killed = True
        # First the pipe: a worker on another host, where no guard reaches, finds its
        # end and dies. Then the guard, which kills what descends from the command here.
        self._hang_up()
        self._process.end()

    def wait(self, log_end: int | None) -> ProcessExit:
        """Wait until the command has exited; return how."""
        # The guard sweeps before it exits: nothing on this host writes to the log any
        # more when its last lines are read.
        code = self._process.wait()
        return ProcessExit(
            pid=self._process.pid,
            code=code,
            is_killed=self._is_killed,
            out_of_memory=self._process.out_of_memory,
            lines=worker_logs.last_lines(self._log, self._log_start, log_end),
            log=str(self._log),
        )

    def close(self) -> None:
        """Free its descriptors; ends what still runs."""
        self._hang_up()
        self._process.close()

    def _hang_up(self) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._stdin.close()


class PipedWorker(WorkerHandle):
    """One start of an executable, at the end of a command line; a `Worker`."""

    def __init__(
        self,
        command: Sequence[str],
        executable: Executable,
        attempt: int,
        *,
        plan: Plan,
        launch_type: str,
        report: Report,
    ) -> None:
        """Start it.

        Args:
          command: Command that runs the command line after it, at the worker's place;
            such as `["srun", "--ntasks=1"]`. It gets the group's environment variables.
          executable: Function and resources of the worker.
          attempt: Number of this start, from 0.
          plan: Plan of the run.
          launch_type: Name of the launcher.
          report: `report` of the launcher; takes the worker's end, once.

        Raises:
          LaunchError: The node does not pickle, or the command cannot be run.
        """
        name = executable.name
        environment = {**os.environ, **executable.resources.env}
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise LaunchError(
                f"`{name}` must be started by a command that can be run, got "
                f"{command[0]!r}. Install it."
            )
        names = [each.name for each in plan.executables]
        plan.logs.mkdir(parents=True, exist_ok=True)
        log = worker_logs.log_paths(plan.logs, names)[name]
        recipe = plan.folder / f"recipe-{names.index(name)}-{attempt}"
        job = Job(
            program=plan.program,
            worker=name,
            launch_type=launch_type,
            recipe=str(recipes.write(executable, recipe)),
            attempt=attempt,
        )
        own = sorted(executable.resources.env)
        process = PipedProcess(
            [*command, *piped_interpreter(job, read_surroundings(), own)],
            name=name,
            attempt=attempt,
            log=log,
            owner=plan.run_id,
            environ=environment,
            folder=plan.folder,
            keep=what_stays(plan.folder, plan.logs),
        )
        super().__init__(name, attempt, process, report)
