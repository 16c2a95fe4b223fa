"""Result of Launchpad's `launch`: a run whose `wait` takes groups first."""

from collections.abc import Sequence
from typing import Any

from replicator.launchpad_bridge.run import Run


class Controller:
    """A running program; all but `wait` is the same as in `Run`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def wait(
        self,
        labels_to_wait_for: Sequence[str] | None = None,
        raise_error: bool = True,
        return_on_first_completed: bool = False,
    ) -> None:
        """Wait until nodes have ended.

        Args:
          labels_to_wait_for: Wait for these groups only.
          raise_error: Whether to raise where a node failed.
          return_on_first_completed: Return when the first of them has ended.

        Raises:
          NodeFailedError: A node failed.
          LaunchError: A node waits for its own run, or a label does not exist.
        """
        self.run.wait(
            labels=labels_to_wait_for,
            raise_error=raise_error,
            return_on_first_completed=return_on_first_completed,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)
