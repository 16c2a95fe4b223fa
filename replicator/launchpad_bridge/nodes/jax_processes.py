"""One function in several processes that JAX joins to a group: `JaxProcesses`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic

from replicator.distributed.leaving import leave_at_once
from replicator.errors import check_count
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.py_node import PyNode, Worked
from replicator.launchpad_bridge.running.joining import join_group


class JaxProcesses(PyNode[Any, Worked], Generic[Worked]):
    """Runs a function in each of several processes, joined by `jax.distributed`.

    `replicator.distributed.initialize` has been called when the function runs, so each
    process has the devices of all. They are processes under every launcher, workers
    named "label/0", "label/1", …; each has the resources of its group, and makes
    clients of its handles itself. When one fails the others are killed, and if the
    group has a `restart` all start again. `run.results["label"]` is the result of the
    first. All of this holds for a group of one process, too.

    >>> learner = lp.JaxProcesses(jax.process_count, processes=2)
    >>> with program.group("learner", restart=lp.Restart(attempts=3)):
    ...     handle = program.add_node(learner)
    """

    is_expanded = True

    def __init__(
        self, function: Callable[..., Worked], *args: Any, processes: int, **kwargs: Any
    ) -> None:
        """Store the function and its arguments.

        Args:
          function: Runs in each process, in its main thread. It must end in all of
            them, and check `lp.stop_event()` at the same step in all.
          *args: Its arguments, which may hold handles and `Deferred`s, nested.
          processes: Number of processes.
          **kwargs: Its named arguments, likewise.

        Raises:
          ArgumentError: `processes` is not a whole number above 0.
        """
        check_count("processes", processes)
        super().__init__(function, *args, **kwargs)
        self._members = [
            GroupMember(function, args, kwargs, process=number, processes=processes)
            for number in range(processes)
        ]

    @property
    def inner_nodes(self) -> list[Node[Any]]:
        """Return the members: a planned program has them in the place of this node."""
        return list(self._members)


class GroupMember(PyNode[Any, Worked], Generic[Worked]):
    """One of the processes; made by `JaxProcesses`.

    Attributes:
      process: Number of this process, from 0.
      processes: Number of processes.
      is_numbered: Whether its name is "label/index" even if it is the only one.
    """

    is_numbered = True
    has_own_process = True

    def __init__(
        self,
        function: Callable[..., Worked],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        process: int,
        processes: int,
    ) -> None:
        super().__init__(function, *args, **kwargs)
        self.process = process
        self.processes = processes
        self._meet_in: Path | None = None

    def plan_meeting(self, folder: Path) -> None:
        """Set the run's folder, in which the members of the group find each other."""
        self._meet_in = folder

    def _call_function(self) -> Worked:
        assert self._meet_in is not None, "`make_plan` calls `plan_meeting`"
        try:
            join_group(self._meet_in, self.process, self.processes)
            return super()._call_function()
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                # At exit JAX would wait for the others, which wait for this one.
                leave_at_once(1)
            raise
