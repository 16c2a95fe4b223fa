"""What can be said of a run beside its step and its data; the types for it.

`run` and `session` take all of it by keyword, and hand it on in four parts:
checkpoints, evaluation, records, bad numbers. Each refuses what does not go together.
"""

import dataclasses
import os
from typing import Any

from replicator.base.host.paths import checked_path
from replicator.base.types import Dataset
from replicator.checkpoint.retention import Retention
from replicator.engine.evaluation.evaluate import EvalFn
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_function,
    check_kind,
)
from replicator.inputs.adapters import check_read_anew
from replicator.training.best_metric import BestSoFar, Follow
from replicator.training.evaluate_hook import EvaluateEvery
from replicator.training.hooks.schedule import Every, every
from replicator.training.nonfinite.policy import OnNonfinite
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.reports.profiler import check_steps
from replicator.training.watchdog.limits import Limits

__all__ = [
    "BestSoFar",
    "EvaluateEvery",
    "Every",
    "Follow",
    "Limits",
    "Retention",
    "Spikes",
    "every",
]

Directory = str | os.PathLike[str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where and when a run is saved.

    Attributes:
      directory: Holds the checkpoints of this run and of no other; None saves nothing.
      when: At which steps; the last step is saved, too.
      retention: Which of them stay.

    Raises:
      ArgumentError: One is of a wrong kind, or given without a directory.
    """

    directory: Directory
    when: Any  # an `Every` once this is made; a user may say a number of steps
    retention: Any  # a `Retention` once this is made

    def __post_init__(self) -> None:
        check_kind("retention", self.retention, Retention)
        if self.directory is None and self.retention is not None:
            raise ArgumentError(
                "`checkpoint_dir` must be given with `retention`, got None. Pass it, "
                "or leave `retention` out."
            )
        when = self.when
        if self.directory is not None:
            when = _as_schedule("checkpoint_every", when)
        directory = checked_path("checkpoint_dir", self.directory)
        object.__setattr__(self, "directory", directory)
        object.__setattr__(self, "when", when)
        object.__setattr__(self, "retention", self.retention or Retention())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluating:
    """What a run evaluates, and when; nothing, if all is None.

    Attributes:
      eval_fn: As in `rep.evaluate`.
      dataset: Read anew each time.
      when: At which steps; the last one is evaluated, too.
      follow: The number that tells the best step, and when to give up.

    Raises:
      ArgumentError: Some are given without the others, or one is of a wrong kind.
    """

    eval_fn: EvalFn | None
    dataset: Dataset | None
    when: Any  # an `Every` once this is made
    follow: Follow | None

    def __post_init__(self) -> None:
        check_kind("follow", self.follow, Follow)
        given = {
            "eval_fn": self.eval_fn,
            "eval_dataset": self.dataset,
            "eval_every": self.when,
        }
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 3 and self.follow is None:
            return
        if missing:
            raise ArgumentError(
                "`eval_fn`, `eval_dataset` and `eval_every` must be given together, "
                f"got no `{missing[0]}`. Pass it, or leave all out."
            )
        check_function("eval_fn", self.eval_fn, "state, batch")
        check_read_anew("eval_dataset", given["eval_dataset"])
        object.__setattr__(self, "when", _as_schedule("eval_every", self.when))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What a run tells, and where.

    Attributes:
      directory: Where metrics, `run.json` and the journal go; None for nowhere.
      write_every: Steps between written metrics.
      gradient_norm: Whether metrics tell the norm of the gradient.
      display: Whether progress is shown on standard error.
      profile: Steps to trace; None for none.

    Raises:
      ArgumentError: One is of a wrong kind, or there is no place for a trace.
    """

    directory: Directory
    write_every: int = 10
    gradient_norm: bool = True
    display: bool = True
    profile: range | None = None

    def __post_init__(self) -> None:
        check_count("write_every", self.write_every)
        check_flags(gradient_norm=self.gradient_norm, display=self.display)
        directory = checked_path("directory", self.directory)
        object.__setattr__(self, "directory", directory)
        if self.profile is None:
            return
        check_steps("profile", self.profile)
        if directory is None:
            raise ArgumentError(
                "`directory` must be given to profile steps, got None. Pass it: traces "
                "go to `profile/` in it."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadNumbers:
    """What a run does about NaN, infinity and spikes.

    Attributes:
      on_nonfinite: What a metric that is NaN or infinite leads to; None: what fits the
        optimizer.
      spikes: What to watch for; None for nothing.

    Raises:
      ArgumentError: `spikes` is of a wrong kind.
    """

    on_nonfinite: OnNonfinite | None
    spikes: Spikes | None

    def __post_init__(self) -> None:
        check_kind("spikes", self.spikes, Spikes)


def _as_schedule(name: str, when: int | Every) -> Every:
    """Return the schedule that the argument `name` stands for."""
    if isinstance(when, Every):
        return when
    check_count(name, when)
    return every(n_steps=when)
