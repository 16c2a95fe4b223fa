"""Several nodes in processes below one worker: `MultiProcessingColocation`."""

from collections.abc import Callable, Sequence
from typing import Any

from replicator.errors import LaunchError
from replicator.launchpad_bridge import node_context
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.threads_colocation import Colocation
from replicator.protocols import PyTree


class MultiProcessingColocation(Colocation):
    """Runs its nodes in processes of one worker, started again when they fail.

    >>> actors = [lp.CourierNode(Actor, seed) for seed in range(8)]
    >>> program.add_node(
    ...     lp.MultiProcessingColocation(actors, num_retries_on_failure=3),
    ...     label="actors",
    ... )
    """

    def __init__(
        self, nodes: Sequence[Node[Any]], num_retries_on_failure: int = 0
    ) -> None:
        """Remember the nodes.

        Args:
          nodes: What to run together.
          num_retries_on_failure: How often each of them is started again.
        """
        self.num_retries_on_failure = num_retries_on_failure
        # Given by the launch: nodes know no launchers.
        self.run_in_processes: Callable[..., PyTree] | None = None
        super().__init__(nodes)

    def run(self) -> PyTree:
        """Run the inner nodes; return what each returned.

        Raises:
          NodeFailedError: One failed once too often.
          LaunchError: The node was not launched.
        """
        self._check_nodes()
        context = node_context.of_thread()
        if self.run_in_processes is None or context is None:
            raise LaunchError(
                "MultiProcessingColocation must run in a program, got a call of `run`. "
                "Add it to a program and launch that."
            )
        return self.run_in_processes(self, context)
