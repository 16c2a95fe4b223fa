"""Follow one number of an evaluation: the best so far, and when to give up.

Pure: what was, and what happened, give what is and what follows from it. Evaluations
have the same numbers in every process, so that all come to the same decision.
"""

import dataclasses
from typing import Literal, TypeAlias

from replicator.errors import (
    ArgumentError,
    check_number,
    check_text,
    check_whole,
)

Verdict: TypeAlias = Literal["best", "go_on", "stop"]
"""What an evaluation means for the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation was made.

    Attributes:
      step: Updates that the state had behind it.
      value: What is followed; NaN is worse than every number.
    """

    step: int
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BestSoFar:
    """What is remembered from one evaluation to the next; plain, to be saved.

    Attributes:
      step: The step of the best evaluation; None before there was a number.
      value: What it found.
      waited: Evaluations since then.
    """

    step: int | None = None
    value: float | None = None
    waited: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """Which metric to follow, and with how much patience.

    Attributes:
      metric: Its name in the result of the evaluation; `a/b` for one inside another.
      goal: Whether the smallest or the largest value is the best.
      patience: Evaluations without a better value after which to stop; None never.
      min_change: How much better is better.

    Raises:
      ArgumentError: A value breaks its rule.

    >>> patient = Follow("accuracy", goal="max", patience=5)
    >>> result = rep.run(                                    # doctest: +SKIP
    ...     step_fn, dataset, init_fn=init_fn, steps=1000, follow=patient,
    ...     eval_fn=eval_fn, eval_dataset=dataset, eval_every=100,
    ... )
    """

    metric: str
    _: dataclasses.KW_ONLY
    goal: Literal["min", "max"] = "min"
    patience: int | None = None
    min_change: float = 0.0

    def __post_init__(self) -> None:
        check_text("metric", self.metric)
        check_number("min_change", self.min_change)
        if self.patience is not None:
            check_whole("patience", self.patience)
        if self.goal not in ("min", "max"):
            raise ArgumentError(
                f"`goal` must be 'min' or 'max', got {self.goal!r}. Use 'min' for a "
                "loss."
            )
        if self.patience is not None and self.patience < 1:
            raise ArgumentError(
                f"`patience` must be at least 1, got {self.patience}. Leave it out to "
                "never stop early."
            )
        if not self.min_change >= 0:
            raise ArgumentError(
                f"`min_change` must not be negative, got {self.min_change}. Use 0."
            )

    def decide(self, best: BestSoFar, event: Evaluated) -> tuple[BestSoFar, Verdict]:
        """Take in an evaluation.

        Args:
          best: What was before.
          event: What happened.

        Returns:
          What is now, and what it means: a new best, nothing, or the end of patience.
        """
        if self._is_better(event.value, best.value):
            return BestSoFar(step=event.step, value=event.value), "best"
        after = dataclasses.replace(best, waited=best.waited + 1)
        return after, "stop" if self.is_over(after) else "go_on"

    def is_over(self, best: BestSoFar) -> bool:
        """Tell whether patience has ended."""
        return self.patience is not None and best.waited >= self.patience

    def _is_better(self, value: float, than: float | None) -> bool:
        if than is None:
            return value == value  # not NaN
        gain = than - value if self.goal == "min" else value - than
        return gain > self.min_change
