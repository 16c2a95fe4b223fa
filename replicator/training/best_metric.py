"""Follow one number of an evaluation: the best so far, and when to give up.

Pure: `decide` maps the best so far and an evaluation to the new best and a verdict.
Evaluations have the same numbers in every process, so that all decide the same.
"""

import dataclasses
from typing import Literal, TypeAlias

from replicator.errors import (
    ArgumentError,
    check_count,
    check_number,
    check_text,
    check_word,
)

Verdict: TypeAlias = Literal["best", "go_on", "stop"]
"""Meaning of an evaluation for the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation that was made.

    Attributes:
      step: Step of the evaluated state.
      value: Value of the followed metric; NaN is worse than every number.
    """

    step: int
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BestSoFar:
    """The best evaluation so far, as plain values that can be saved.

    Attributes:
      step: Step of the best evaluation; None before there was a number.
      value: Value of the metric then.
      waited: Evaluations since then.
    """

    step: int | None = None
    value: float | None = None
    waited: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """The metric that ranks evaluations, and the patience without a better one.

    Attributes:
      metric: Name in the result of the evaluation; `a/b` for one inside another.
      goal: `"min"` if the smallest value is the best, `"max"` if the largest.
      patience: Evaluations without a better value after which to stop; None never.
      min_change: Least difference that counts as better.

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
        check_word("goal", self.goal, ("min", "max"))
        if self.patience is not None:
            check_count("patience", self.patience, "Leave it out to never stop early.")
        if not self.min_change >= 0:
            raise ArgumentError(
                f"`min_change` must not be negative, got {self.min_change}. Use 0."
            )

    def decide(self, best: BestSoFar, event: Evaluated) -> tuple[BestSoFar, Verdict]:
        """Update the best by an evaluation.

        >>> Follow("loss").decide(BestSoFar(), Evaluated(step=5, value=0.3))
        (BestSoFar(step=5, value=0.3, waited=0), 'best')

        Args:
          best: The best before.
          event: The evaluation.

        Returns:
          The best now, and the verdict: a new best, go on, or the end of patience.
        """
        if self._is_better(event.value, best.value):
            return BestSoFar(step=event.step, value=event.value), "best"
        after = dataclasses.replace(best, waited=best.waited + 1)
        return after, "stop" if self.is_over(after) else "go_on"

    def is_over(self, best: BestSoFar) -> bool:
        """Return whether patience has ended.

        >>> Follow("loss", patience=2).is_over(BestSoFar(step=5, value=0.3, waited=2))
        True
        """
        return self.patience is not None and best.waited >= self.patience

    def _is_better(self, value: float, than: float | None) -> bool:
        if than is None:
            return value == value  # not NaN
        gain = than - value if self.goal == "min" else value - than
        return gain > self.min_change
