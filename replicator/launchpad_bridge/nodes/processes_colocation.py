"""Several nodes added as one, each in a process: `MultiProcessingColocation`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from replicator.base.types import PyTree
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.threads_colocation import Colocation


class MultiProcessingColocation(Colocation):
    """Nodes that are workers of one group, started again when they fail.

    A planned program has its nodes in its place: each is a worker, and a process also
    where the others are threads. Its group's resources are those of each.

    >>> actors = [lp.CourierNode(Learner, seed) for seed in range(8)]
    >>> handle = program.add_node(
    ...     lp.MultiProcessingColocation(actors, num_retries_on_failure=3),
    ...     label="actors",
    ... )
    """

    is_expanded = True
    # Given by `launch`: nodes know no launchers.
    run_alone: ClassVar[Callable[..., list[PyTree]]]

    def __init__(
        self, nodes: Sequence[Node[Any]], num_retries_on_failure: int = 0
    ) -> None:
        """Remember the nodes.

        Args:
          nodes: What to run together.
          num_retries_on_failure: How often each of them is started again; where it is
            not 0 it wins over the `restart` of its group.
        """
        self.num_retries_on_failure = num_retries_on_failure
        super().__init__(nodes)

    def run(self) -> list[PyTree]:
        """Run the nodes outside of a program; return what each returned.

        Raises:
          NodeFailedError: One failed once too often.
        """
        self.check_nodes()
        return self.run_alone()
