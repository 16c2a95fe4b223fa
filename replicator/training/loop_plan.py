"""Say how long a loop runs, how, and what its end is; refuse what is not even."""

import dataclasses
from collections.abc import Iterator

from replicator.errors import ArgumentError
from replicator.inputs.placement import Placed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """How long to run, and how.

    Attributes:
      steps: Updates in all, those before `start_step` included; None runs until the
        input ends.
      start_step: Updates that the state has behind it.
      steps_per_call: Updates that one call of the step makes. Above 1, each metric has
        a leading axis of that size.

    Raises:
      ArgumentError: A number is out of range, or calls do not fit into `steps`.
    """

    steps: int | None
    start_step: int = 0
    steps_per_call: int = 1

    def __post_init__(self) -> None:
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if self.steps is not None and not whole:
            raise ArgumentError(
                f"`steps` must be a whole number, got {self.steps!r}. "
                "Pass an `int`, or `steps=None` to run until the input ends."
            )
        if self.steps is not None and self.steps < 0:
            raise ArgumentError(
                f"`steps` must be at least 0, got {self.steps}. "
                "Pass `steps=None` to run until the input ends."
            )
        self._require_whole_calls()

    def _require_whole_calls(self) -> None:
        # A last call of fewer steps would be another program, compiled at the very end.
        n, left = self.steps_per_call, (self.steps or 0) - self.start_step
        if self.steps is None or left <= 0 or left % n == 0:
            return
        lower, upper = self.steps - left % n, self.steps - left % n + n
        remedy = f"{lower} or {upper}" if lower > self.start_step else f"{upper}"
        after = f" from step {self.start_step} on" if self.start_step else ""
        raise ArgumentError(
            f"`steps` must be a multiple of `steps_per_call`{after}, "
            f"got {self.steps} for {n}. Use {remedy}."
        )


class EndOfBatches(StopIteration):
    """The end of a session's own batches, and of nobody else's."""


class Batches(Iterator[Placed]):
    """Batches whose end is known as theirs, also where a turn's `next` meets it.

    Args:
      batches: Them.
    """

    def __init__(self, batches: Iterator[Placed]) -> None:
        self._batches = batches

    def __next__(self) -> Placed:
        """Return the next one.

        Raises:
          EndOfBatches: There is none.
        """
        try:
            return next(self._batches)
        except StopIteration:
            raise EndOfBatches from None
