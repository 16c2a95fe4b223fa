"""Several nodes in processes below one worker: `MultiProcessingColocation`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from replicator.base.types import PyTree
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.threads_colocation import Colocation
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.running.node_context import loose_context


class MultiProcessingColocation(Colocation):
    """Runs its nodes in processes of one worker, started again when they fail.

    >>> actors = [lp.CourierNode(Learner, seed) for seed in range(8)]
    >>> handle = program.add_node(
    ...     lp.MultiProcessingColocation(actors, num_retries_on_failure=3),
    ...     label="actors",
    ... )
    """

    # Given by `launch`: nodes know no launchers.
    run_in_processes: ClassVar[Callable[..., PyTree]]

    def __init__(
        self, nodes: Sequence[Node[Any]], num_retries_on_failure: int = 0
    ) -> None:
        """Remember the nodes.

        Args:
          nodes: What to run together.
          num_retries_on_failure: How often each of them is started again.
        """
        self.num_retries_on_failure = num_retries_on_failure
        super().__init__(nodes)

    def run(self) -> PyTree:
        """Run the inner nodes; return what each returned.

        Raises:
          NodeFailedError: One failed once too often.
        """
        self._check_nodes()
        return self.run_in_processes(node_context.of_thread() or loose_context())
