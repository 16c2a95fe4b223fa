"""Types and interfaces between programs, launchers and runs.

    program     nodes, handles, groups: a graph, checked before it runs
    launcher    turns each executable of the graph into a worker
    run         drives the supervisor: starts, watches, stops workers
    supervisor  decide(state, event) -> (state, actions): when to do what, purely

Users may add launchers: a launcher decides where workers run and how they start. The
meaning of a failure, stop requests and the end of a run are the same under all of them.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from replicator.base.types import PyTree
from replicator.distributed.processes.driver import Worker
from replicator.distributed.processes.states import Restart, StopAsked


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Resources of each worker of a group; the same under every launcher.

    Attributes:
      cpus: Number of cores; None for no claim.
      gpus: Number of visible accelerators; 0 hides them, None leaves all visible.
      memory_bytes: Bytes of memory; None for no claim.
      env: Environment variables besides the launcher's own.
    """

    cpus: float | None = None
    gpus: int | None = None
    memory_bytes: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


class NodeContext(Protocol):
    """Context of a running node; `lp.context` gives it to users."""

    @property
    def program(self) -> str: ...  # noqa: D102
    @property
    def worker(self) -> str:
        """Return the worker's name: "label" or "label/index"."""
        ...

    @property
    def launch_type(self) -> str:
        """Return the launcher's name: "threads", "processes", "test", "ray"."""
        ...

    @property
    def attempt(self) -> int:
        """Return the number of this start of the worker: 0 for the first."""
        ...

    @property
    def stop_event(self) -> threading.Event:
        """Return the event that is set when this worker is asked to stop."""
        ...

    def stop_program(self) -> None:
        """Ask for the whole run to stop; returns at once, may be called anywhere."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Executable:
    """Plan of one worker.

    Attributes:
      label: Label of its group.
      index: Number of the worker in its group.
      name: "label", or "label/index" where the group has several, or processes.
      run: Runs the node and returns its result. Pickled by value (cloudpickle) where
        the worker is another process: only from a launcher to a worker of its own.
      addresses: `rpc` addresses of its servers.
      resources: Resources of its group.
      restart: Restarts of its group.
      is_member: Whether it is one of a group of processes, which fail and restart
        together: all of its label.
      retries: Number of restarts that a failure after the last one names, as in
        Launchpad; 0 to name none.
      ends_program: Whether `run.wait()` waits only for this worker and those like it:
        all others serve them.
    """

    label: str
    index: int
    name: str
    run: Callable[[NodeContext], PyTree]
    addresses: Sequence[str] = ()
    resources: Resources = dataclasses.field(default_factory=Resources)
    restart: Restart = dataclasses.field(default_factory=Restart)
    is_member: bool = False
    retries: int = 0
    ends_program: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A checked program, ready to run.

    Attributes:
      program: Name of the program.
      run_id: Unique id of the run.
      folder: Private folder of the run (0700): sockets, secret, recipes.
      logs: Folder for the output of workers: in `folder`, or of the user.
      executables: One for each worker.
    """

    program: str
    run_id: str
    folder: Path
    logs: Path
    executables: Sequence[Executable]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """End of one start of a worker.

    Attributes:
      name: Name of the executable.
      attempt: Number of the start that ended: 0 for the first.
      outcome: "returned", "raised", "died" (without a report: killed, out of memory),
        "stopped" if it was asked to, or "preempted" if a signal from elsewhere stopped
        it: a failure unless the run was asked to stop.
      result: Its return value.
      error: Its error, or a `NodeFailedError` for a worker that died or was preempted.
      code: Exit code of its process, negative for a signal; None if it is unknown.
    """

    name: str
    attempt: int
    outcome: Literal["returned", "raised", "died", "stopped", "preempted"]
    result: PyTree = None
    error: BaseException | None = None
    code: int | None = None


Report = Callable[[Exited | StopAsked], None]
"""Function that takes what happens; called from any thread, it never raises."""


class Launcher(Protocol):
    """Starts workers on its platform. Public: users write their own."""

    @property
    def name(self) -> str:
        """Return the name for `lp.launch(program, launch_type=name)`."""
        ...

    def open(self, plan: Plan, report: Report) -> "Workers":
        """Make ready to start workers of `plan`.

        Args:
          plan: Workers that will run.
          report: Takes what happens.
        """
        ...


class Workers(Protocol):
    """The workers of one run."""

    def start(self, executable: Executable, attempt: int) -> Worker:
        """Begin to start a worker, and return. Its end is reported once.

        Raises:
          LaunchError: It cannot be started.
        """
        ...

    def close(self) -> None:
        """Kill all workers that still run, and delete all files that were made."""
