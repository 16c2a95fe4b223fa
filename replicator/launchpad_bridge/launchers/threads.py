"""Run each node in a thread of this process: quick to start, easy to look into.

A thread cannot be killed. One that does not stop when it is asked has an exception
raised in it, which ends a loop of Python; one that waits in foreign code for ever is
left behind, named, and ends with the process. Nodes of a `MultiProcessingColocation`
and members of `JaxProcesses` have processes here, too.
"""

import contextlib
import dataclasses
import logging
import threading
from contextlib import AbstractContextManager
from typing import Any, Literal

from replicator.distributed.processes.driver import Worker
from replicator.errors import NodeFailedError
from replicator.launchpad_bridge.launchers.processes import Processes
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Plan,
    Report,
    StopAsked,
)
from replicator.launchpad_bridge.recipes import pack
from replicator.launchpad_bridge.running.node_run import run_worker
from replicator.launchpad_bridge.running.stop_event import StopEvent
from replicator.launchpad_bridge.running.thread_interrupt import raise_in_thread

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threads:
    """The launcher `lp.launch(program, launch_type="threads")` uses.

    Attributes:
      serialize: Whether to check that the nodes could run in other processes.
      by_reference: Whether to hand arguments and results over as they are, instead of
        copies: quicker, but what one node changes in place changes in the other, unlike
        under any other launcher.
    """

    name = "threads"
    shows_output = True

    serialize: bool = False
    by_reference: bool = False

    def open(
        self, plan: Plan, report: Report, *, launch_type: str = name
    ) -> "ThreadWorkers":
        """Make ready to start threads.

        Args:
          plan: What will run.
          report: Takes what happens.
          launch_type: Name of the launcher, for nodes.

        Raises:
          LaunchError: A node does not pickle.
        """
        if self.serialize:
            for executable in plan.executables:
                pack(executable)
        return ThreadWorkers(
            plan, report, launch_type=launch_type, by_reference=self.by_reference
        )


@dataclasses.dataclass(eq=False)
class ThreadWorkers:
    """The threads of one run."""

    plan: Plan
    report: Report
    _: dataclasses.KW_ONLY
    launch_type: str
    by_reference: bool = False

    def __post_init__(self) -> None:
        plan, report = self.plan, self.report
        processes = [each for each in plan.executables if has_own_process(each)]
        self._processes = (
            Processes().open(dataclasses.replace(plan, executables=processes), report)
            if processes
            else None
        )
        with_env = {
            each.label
            for each in plan.executables
            if each.resources.env and not has_own_process(each)
        }
        if with_env:
            _LOG.warning(
                "%s: threads share one environment; that of %s is not set",
                *(plan.program, ", ".join(sorted(with_env))),
            )

    def start(self, executable: Executable, attempt: int) -> Worker:
        """Start a thread, or a process where the node has one of its own.

        Raises:
          LaunchError: A process cannot be started.
        """
        if self._processes is not None and has_own_process(executable):
            return self._processes.start(executable, attempt)
        context = ThreadContext(
            program=self.plan.program,
            worker=executable.name,
            launch_type=self.launch_type,
            attempt=attempt,
            report=self.report,
            by_reference=self.by_reference,
        )
        return ThreadWorker(executable, context)

    def close(self) -> None:
        """End processes. Threads that ended leave nothing, others cannot be helped."""
        if self._processes is not None:
            self._processes.close()


def has_own_process(executable: Executable) -> bool:
    """Return whether a worker is a process where others are threads."""
    return getattr(executable.run, "own_process", False)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ThreadContext:
    """The `NodeContext` of a node in this process."""

    program: str
    worker: str
    launch_type: str
    attempt: int
    report: Report
    stop_event: StopEvent = dataclasses.field(default_factory=StopEvent)
    exchange: Any = None
    by_reference: bool = False

    def stop_program(self) -> None:
        """Ask for the whole run to stop; returns at once."""
        self.report(StopAsked(by=self.worker))


class ThreadWorker:
    """One node in a thread."""

    def __init__(
        self,
        executable: Executable,
        context: ThreadContext,
        around: AbstractContextManager[None] | None = None,
    ) -> None:
        self._executable = executable
        self._context = context
        self._around = around or contextlib.nullcontext()
        # Guards `_is_reported`, as `_run` and `kill` are in two threads. No other lock
        # is taken while it is held.
        self._lock = threading.Lock()
        self._is_reported = False
        # Ends with its node. A daemon, as one that is left behind must not keep the
        # process from ending.
        self._thread = threading.Thread(
            target=self._run, name=executable.name, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Set the node's stop event."""
        self._context.stop_event.set()

    def kill(self) -> None:
        """Raise `SystemExit` in the thread, and count it as dead."""
        # Raised at its next instruction of Python; in foreign code, once that returns.
        # Not waited for: the run goes on without it.
        raise_in_thread(self._thread, SystemExit)
        name = self._executable.name
        error = NodeFailedError(
            f"`{name}` did not stop, and its thread was left behind: threads cannot be "
            "killed. Let it look at `lp.stop_event()`.",
            node=name,
        )
        self._tell_error("died", error)

    def _run(self) -> None:
        try:
            with self._around:
                attempt = self._context.attempt
                self._tell(run_worker(self._executable, attempt, self._context))
        except BaseException as error:  # raised around the node, or by `kill`
            self._tell_error("raised", error)

    def _tell_error(
        self, outcome: Literal["raised", "died"], error: BaseException
    ) -> None:
        name, attempt = self._executable.name, self._context.attempt
        self._tell(Exited(name=name, attempt=attempt, outcome=outcome, error=error))

    def _tell(self, exited: Exited) -> None:
        """Report an end, the first one that is known."""
        with self._lock:
            is_first, self._is_reported = not self._is_reported, True
        # Not under the lock: in a fixed order `_report` sets events, which take others.
        if is_first:
            self._context.report(exited)
