"""What programs, launchers and runs hand each other.

    program     nodes, handles, groups: a graph, checked before it runs
    launcher    turns each executable of the graph into a worker
    run         drives the supervisor: starts, watches, stops workers
    supervisor  decide(state, event) -> (state, actions): when to do what, purely

A launcher is what users may add: it says where workers live and how they start. What a
failure means, who is told to stop and when it is over, is the same under all of them.
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
    """What one worker of a group needs; the same words under every launcher.

    Attributes:
      cpus: Cores it counts on; None for no claim.
      gpus: Accelerators it may see; 0 hides them from it, None leaves all visible.
      memory_bytes: How much it needs; None for no claim.
      env: Environment variables that it gets besides the launcher's own.
    """

    cpus: float | None = None
    gpus: int | None = None
    memory_bytes: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


class NodeContext(Protocol):
    """What a running node knows of its program; `lp.context` hands it to users."""

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
        """Return which start of this worker it is: 0 for the first."""
        ...

    @property
    def stop_event(self) -> threading.Event:
        """Return what is set when this worker is asked to stop."""
        ...

    def stop_program(self) -> None:
        """Ask for the whole run to stop; returns at once, may be called anywhere."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Executable:
    """What one worker runs.

    Attributes:
      label: Of its group.
      index: Which of the group's workers it is.
      name: "label", or "label/index" where the group has several, or processes.
      run: Runs the node and returns its result. Pickled by value (cloudpickle) where
        the worker is another process: only from a launcher to a worker of its own.
      addresses: Where its servers listen, as `rpc` addresses.
      resources: Of its group.
      restart: Of its group.
      is_member: Whether it is one of a group of processes, which fail and start again
        together: all of its label.
      retries: Restarts after which a failure says, as Launchpad does, that they were
        all; 0 for no such words.
      ends_program: Whether who waits for the program waits for this, and those like it:
        all others serve it.
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
      program: Its name.
      run_id: Unlike that of any other run.
      folder: Private to the run (0700): sockets, secret, recipes.
      logs: Where the output of workers is kept: in `folder`, or where the user wants.
      executables: One for each worker.
    """

    program: str
    run_id: str
    folder: Path
    logs: Path
    executables: Sequence[Executable]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """How a worker ended.

    Attributes:
      name: The executable's.
      attempt: Its start that ended: 0 for the first.
      outcome: "returned", "raised", "died" (without a word: killed, out of memory),
        "stopped" where it was asked to, or "preempted" where a signal from elsewhere
        stopped it: a failure while nobody has asked the run to stop.
      result: What it returned.
      error: What it raised, or a `NodeFailedError` that says how it died, or that it
        was preempted.
      code: What its process exited with, negative for a signal; None if nobody knows.
    """

    name: str
    attempt: int
    outcome: Literal["returned", "raised", "died", "stopped", "preempted"]
    result: PyTree = None
    error: BaseException | None = None
    code: int | None = None


class Launcher(Protocol):
    """Where workers live. Public: users write their own."""

    @property
    def name(self) -> str:
        """Return the word for it: `lp.launch(program, launch_type=name)`."""
        ...

    def open(
        self, plan: Plan, report: Callable[[Exited | StopAsked], None]
    ) -> "Workers":
        """Make ready to start workers of `plan`.

        Args:
          plan: What will run.
          report: Takes what happens; may be called from any thread, never raises.
        """
        ...


class Workers(Protocol):
    """The workers of one run."""

    def start(self, executable: Executable, attempt: int) -> Worker:
        """Start one; returns when it is on its way. Its end is reported once.

        Raises:
          LaunchError: It cannot be started.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind: kills what still runs, deletes what was made."""
        ...
