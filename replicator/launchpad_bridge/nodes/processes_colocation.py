"""Several nodes added as one, each in a process: `MultiProcessingColocation`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from replicator.base.types import PyTree
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.threads_colocation import Colocation


class MultiProcessingColocation(Colocation):
    """Nodes that are workers of one group, started again when they fail.

    A planned program has its nodes in its place: each is a worker, and a process even
    if the others are threads. Each has the resources of the group.

    >>> actors = [lp.CourierNode(Learner, seed) for seed in range(8)]
    >>> handle = program.add_node(
    ...     lp.MultiProcessingColocation(actors, num_retries_on_failure=3),
    ...     label="actors",
    ... )
    """

    is_expanded = True
    # Set by `launch`, which nodes do not import.
    run_alone: ClassVar[Callable[..., list[PyTree]]]

    def __init__(
        self, nodes: Sequence[Node[Any]], num_retries_on_failure: int = 0
    ) -> None:
        """Add the nodes.

        Args:
          nodes: Nodes to run together.
          num_retries_on_failure: Number of restarts of each of them; if it is not 0 it
            overrides the `restart` of its group.
        """
        self.num_retries_on_failure = num_retries_on_failure
        super().__init__(nodes)

    def run(self) -> list[PyTree]:
        """Run the nodes outside of a program; return their results.

        Raises:
          NodeFailedError: One failed after its last restart.
        """
        self.check_nodes()
        return self.run_alone()
