"""Run each worker in a process of its own, forked from one that has imported all.

    open    start a fork server: it imports what the script has imported, in parallel
            with whatever the launcher does meanwhile
    start   hand it a recipe's path, and one end of a socket for the worker
    close   cut its lifeline: it and all below it are gone

Groups with environment variables of their own have a fork server of their own: packages
read them when they are imported. Where a fork would not be safe (a package starts a
thread or JAX's backend when it is imported; not Linux), each worker of the run is a
fresh interpreter, with a warning.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from replicator.distributed.processes.driver import Worker
from replicator.errors import LaunchError, check_word
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.launchers.forked.fork_server_client import (
    ForkServer,
    Order,
)
from replicator.launchpad_bridge.launchers.forked.preloading import heavy_modules
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.local_resources import (
    ALLOCATION,
    look_at_machine,
    share_out,
)
from replicator.launchpad_bridge.launchers.log_tail import LogTail
from replicator.launchpad_bridge.launchers.worker_handle import WorkerHandle
from replicator.launchpad_bridge.launchers.worker_logs import log_paths
from replicator.launchpad_bridge.launchers.worker_process import Job
from replicator.launchpad_bridge.protocols import Executable, Plan, Report

Kind = tuple[tuple[str, str], ...]
"""Environment variables that the workers of one fork server share."""

_TERMINALS = (
    "current_terminal",
    "output_to_files",
    "gnome-terminal",
    "gnome-terminal-tabs",
    "xterm",
    "tmux_session",
    "byobu_session",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """The launcher `processes`.

    Attributes:
      start: "forkserver", where a fork is safe, or "spawn": fresh interpreters.
      preload: Modules that the fork server imports; by default all that the script has
        imported from installed packages.
      pin_cores: Whether workers that claim whole cores get them for themselves.
      terminal: Terminal that shows the output of workers, which is kept in files, too:
        this one, or with "output_to_files" none. Launchpad's names of other terminals
        mean this one.
    """

    name = "processes"

    start: Literal["forkserver", "spawn"] = "forkserver"
    preload: Sequence[str] | None = None
    pin_cores: bool = False
    terminal: str | None = None

    def __post_init__(self) -> None:
        check_word("start", self.start, ("forkserver", "spawn"))
        if self.terminal is not None:
            check_word("terminal", self.terminal, _TERMINALS)

    @property
    def shows_output(self) -> bool:
        """Return whether what workers print is shown besides being kept."""
        return self.terminal != "output_to_files"

    def open(self, plan: Plan, report: Report) -> "ProcessWorkers":
        """Make ready to start workers of `plan`.

        Raises:
          LaunchError: The machine has not what a group needs, no process can start, or
            a node does not pickle.
        """
        return ProcessWorkers(self, plan, report)


class ProcessWorkers:
    """The processes of one run."""

    def __init__(
        self,
        options: Processes,
        plan: Plan,
        report: Report,
    ) -> None:
        self._plan = plan
        self._report = report
        self._surroundings = read_surroundings()
        self._shares = share_out(
            plan.executables,
            look_at_machine(os.environ),
            os.environ,
            pin_cores=options.pin_cores,
        )
        plan.logs.mkdir(parents=True, exist_ok=True)
        self._recipes: dict[str, Path] = {}
        self._logs = log_paths(plan.logs, [each.name for each in plan.executables])
        given = options.preload
        self._modules = list(given) if given is not None else heavy_modules()
        self._forks = options.start == "forkserver" and sys.platform == "linux"
        # Made here and closed by `close`, both in the driver's thread, which starts all
        # workers as well: no lock.
        self._servers: dict[Kind, ForkServer] = {}
        # Started last: where `open` fails there is nothing to show, and no thread.
        self._tail = LogTail(self._logs) if options.shows_output else None
        try:
            for kind in dict.fromkeys(map(_kind, plan.executables)):
                self._servers[kind] = self._open_server(kind)
            # While the fork servers import. A node that does not pickle starts nothing.
            for executable in plan.executables:
                self._recipe(executable)
        except LaunchError:
            # Nobody has these `Workers` to close.
            self._close()
            raise
        if self._tail is not None:
            self._tail.start()

    def start(self, executable: Executable, attempt: int) -> Worker:
        """Start one; returns when it is on its way. Its end is reported once.

        Raises:
          LaunchError: It cannot be started.
        """
        # The same cores and accelerators in each attempt: the one before has ended.
        share = self._shares[executable.name]
        job = Job(
            program=self._plan.program,
            worker=executable.name,
            launch_type="processes",
            recipe=str(self._recipe(executable)),
            attempt=attempt,
            environment=share.environment,
        )
        process = self._servers[_kind(executable)].start(
            job, cores=share.cores, log=self._logs[executable.name]
        )
        return WorkerHandle(executable.name, attempt, process, self._report)

    def close(self) -> None:
        """Leave nothing behind: kills what still runs, deletes what was made."""
        self._close()
        # After the workers: its last look shows all that they have written.
        if self._tail is not None:
            self._tail.close()

    def _close(self) -> None:
        # Then all handles have their ends, and their threads end by themselves.
        for server in self._servers.values():
            server.close()
        for recipe in self._recipes.values():
            recipe.unlink(missing_ok=True)

    def _recipe(self, executable: Executable) -> Path:
        """Return the file with what a worker runs; written once for all attempts."""
        # Of the first attempt: what a node captures must not change between two.
        if executable.name not in self._recipes:
            path = self._plan.folder / f"recipe-{len(self._recipes)}"
            self._recipes[executable.name] = recipes.write(executable, path)
        return self._recipes[executable.name]

    def _open_server(self, kind: Kind) -> ForkServer:
        own = dict(kind)
        order = Order(
            run_id=self._plan.run_id,
            forks=self._forks,
            modules=self._modules if self._forks else (),
            surroundings=self._surroundings,
            own_environment=sorted(own),
        )
        return ForkServer(
            order,
            environment={**ALLOCATION, **os.environ, **own},
            folder=self._plan.folder,
            logs=self._plan.logs,
        )


def _kind(executable: Executable) -> Kind:
    """Return variables that packages may read early: a fork server for each set."""
    return tuple(sorted(executable.resources.env.items()))
