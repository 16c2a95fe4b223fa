"""Decide which checkpoints stay, and which of them is the best.

Pure: the state is a tuple of `Saved`, oldest first; an event is one more.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from replicator.errors import (
    ArgumentError,
    check_count,
    check_counts,
    check_text,
    check_word,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A committed checkpoint, as retention sees it.

    Attributes:
      step: Updates made.
      metric: Value that it is ranked by; None if it was not measured.
    """

    step: int
    metric: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rule for checkpoints to keep; the newest always stays.

    Attributes:
      keep_last: Number of newest checkpoints to keep.
      keep_best: Number of best ones to keep by `metric`; of equal ones the older.
      metric: Name of the metric that ranks. One that is NaN or absent is never best.
        In a run the names are those of its records: `loss` of the saved step;
        `eval/accuracy` if an evaluation was made after that step.
      goal: `"min"` if a small metric is good, `"max"` if a large one is.
      keep_every: Steps that are a multiple of this are kept, too.

    Raises:
      ArgumentError: A number is out of range, or `keep_best` lacks `metric`.

    >>> retention = Retention(keep_last=2, keep_best=1, metric="loss")
    >>> result = rep.run(
    ...     step_fn, dataset, init_fn=init_fn, steps=3, retention=retention,
    ...     checkpoint_dir="checkpoints", checkpoint_every=2,
    ... )
    """

    keep_last: int = 3
    keep_best: int = 0
    metric: str | None = None
    goal: Literal["min", "max"] = "min"
    keep_every: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "keep_last", "keep_every")
        check_count("keep_best", self.keep_best, "Leave it out for none.", least=0)
        check_word("goal", self.goal, ("min", "max"))
        if self.metric is not None:
            check_text("metric", self.metric)
        if self.keep_best and self.metric is None:
            raise ArgumentError(
                f"`metric` must be given with `keep_best`, got None for "
                f"{self.keep_best}. Pass the name of a metric that is saved."
            )

    def decide(
        self, kept: tuple[Saved, ...], saved: Saved
    ) -> tuple[tuple[Saved, ...], tuple[int, ...]]:
        """Decide which checkpoints to delete after one more was saved.

        >>> old = (Saved(step=1), Saved(step=2))
        >>> Retention(keep_last=2).decide(old, Saved(step=3))[1]
        (1,)

        Args:
          kept: Checkpoints before, oldest first.
          saved: The new one; it replaces one of the same step.

        Returns:
          The checkpoints to keep, oldest first, and the steps to delete.
        """
        there = (*(old for old in kept if old.step != saved.step), saved)
        stays = {old.step for old in there[-self.keep_last :]}
        stays |= {old.step for old in self._ranked(there)[: self.keep_best]}
        stays |= {old.step for old in there if self._is_milestone(old.step)}
        now = tuple(old for old in there if old.step in stays)
        return now, tuple(old.step for old in there if old.step not in stays)

    def best(self, kept: Iterable[Saved]) -> int | None:
        """Return the step with the best metric; None if none was measured.

        >>> kept = [Saved(step=1, metric=0.5), Saved(step=2, metric=0.7)]
        >>> Retention(metric="accuracy", goal="max").best(kept)
        2
        """
        ranked = self._ranked(kept)
        return ranked[0].step if ranked else None

    def _is_milestone(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0

    def _ranked(self, kept: Iterable[Saved]) -> list[Saved]:
        sign = 1.0 if self.goal == "min" else -1.0
        measured = [
            (sign * old.metric, old)
            for old in kept
            if old.metric is not None and not math.isnan(old.metric)
        ]
        return [old for _, old in sorted(measured, key=lambda pair: pair[0])]
