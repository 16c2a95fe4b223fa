"""Run a program inside a test: in threads, and a failure is raised in the test.

As soon as a node has failed and the others have stopped, `NodeFailedError` is raised
where the test is, even if it waits for something that will never come. (In the main
thread; elsewhere `run.wait()` and the end of `with lp.launch(...)` raise it.)

With a `seed` one node runs at a time. Turns pass where a node calls another, waits for
the stop, or ends; who is next, the seed decides: the same seed, the same order, as
often as the test runs. `lp.wait_for_stop(60)` then takes no time where all others
wait, too. Handlers run in the turn of their caller: they must not wait for others.
Nodes that are processes cannot take turns, and are refused.
"""

import dataclasses

from replicator.distributed.processes.driver import Worker
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.launchers.direct_calls import Exchange
from replicator.launchpad_bridge.launchers.threads import (
    ThreadContext,
    Threads,
    ThreadWorker,
    has_own_process,
)
from replicator.launchpad_bridge.launchers.turns import TurnEvent, Turns
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Plan,
    Report,
    StopAsked,
    Workers,
)
from replicator.launchpad_bridge.running.stop_event import StopEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestMode:
    """The launcher `lp.launch(program, launch_type="test")` uses.

    Attributes:
      serialize: Whether to check that the nodes could run in other processes.
      seed: Decides the order in which nodes run, one at a time; None: they run as
        threads do.
      longest_turn_s: Seconds that one may run before it counts as stuck.

    >>> node = program.add_node(lp.PyNode(sum, [1, 2]), label="adder")
    >>> with lp.launch(program, lp.TestMode(seed=7)) as run:
    ...     run.wait()
    >>> run.results["adder"]
    3
    """

    name = "test"
    shows_output = True
    __test__ = False  # no test class, for pytest

    serialize: bool = True
    seed: int | None = None
    longest_turn_s: float = 60.0

    def open(self, plan: Plan, report: Report) -> Workers:
        """Make ready to start threads.

        Raises:
          LaunchError: A node does not pickle.
          ArgumentError: There is a seed, and a node has a process of its own.
        """
        if self.seed is not None:
            _check_threads(plan, self.seed)
        threads = Threads(serialize=self.serialize)
        workers = threads.open(plan, report, launch_type=self.name)
        if self.seed is None:
            return workers
        names = [each.name for each in plan.executables]
        turns = Turns(names, self.seed, longest_s=self.longest_turn_s)
        return _OrderedWorkers(plan, report, turns)


class _OrderedWorkers:
    """Threads that take turns."""

    def __init__(self, plan: Plan, report: Report, turns: Turns) -> None:
        self._plan = plan
        self._report = report
        self._turns = turns
        # The driver's thread appends; a node in its turn, or that thread, walks it. An
        # event of an attempt that has ended stays: to set it once more does no harm.
        self._events: list[StopEvent] = []
        self.exchange = Exchange(turns)

    def start(self, executable: Executable, attempt: int) -> Worker:
        """Start a thread, which waits for its turn."""
        event = TurnEvent(self._turns)
        self._events.append(event)
        context = ThreadContext(
            program=self._plan.program,
            worker=executable.name,
            attempt=attempt,
            launch_type=TestMode.name,
            report=self._tell,
            stop_event=event,
            exchange=self.exchange,
        )
        return ThreadWorker(executable, context, self._turns.taken(executable.name))

    def close(self) -> None:
        """Return: threads that ended leave nothing."""

    def _tell(self, event: Exited | StopAsked) -> None:
        """Let a stop come in this turn, not whenever the run gets to it."""
        # Here, in the turn of the node that asks or fails, and before the driver's
        # thread knows of it: that thread has no turn, and runs whenever it likes.
        if isinstance(event, StopAsked) or event.outcome in ("raised", "died"):
            for stop_event in self._events:
                stop_event.set()
        self._report(event)


def _check_threads(plan: Plan, seed: int) -> None:
    """Refuse processes: calls to and from them wait outside of all turns."""
    others = [each.name for each in plan.executables if has_own_process(each)]
    if others:
        raise ArgumentError(
            f"`seed` must order nodes that are threads, got {seed} and processes: "
            f"{', '.join(others)}. Leave `seed` out."
        )
