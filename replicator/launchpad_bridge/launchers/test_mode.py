"""Run a program inside a test: in threads, and a failure is raised in the test.

As soon as a node has failed and the others have stopped, `NodeFailedError` is raised
where the test is, even if it waits for something that will never come. (In the main
thread; elsewhere `run.wait()` and the end of `with lp.launch(...)` raise it.)
"""

from collections.abc import Callable
from typing import final

from replicator.launchpad_bridge.launchers.threads import Threads, ThreadWorkers
from replicator.launchpad_bridge.protocols import Exited, Plan, StopAsked


@final
class TestMode:
    """The launcher `lp.launch(program, launch_type="test")` uses."""

    name = "test"
    __test__ = False  # no test class, for pytest

    def __init__(self, *, serialize: bool = True) -> None:
        """Choose how much is checked.

        Args:
          serialize: Check that the nodes could run in other processes.
        """
        self._threads = Threads(serialize=serialize)

    def open(
        self, plan: Plan, report: Callable[[Exited | StopAsked], None]
    ) -> ThreadWorkers:
        """Make ready to start threads.

        Raises:
          LaunchError: A node does not pickle.
        """
        return self._threads.open(plan, report, launch_type=self.name)
