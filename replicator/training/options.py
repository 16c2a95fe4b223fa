"""What can be said of a run beside its step and its data; the types for it.

`run` and `session` take all of it by keyword, and hand most of it on in four parts:
checkpoints, evaluation and records, which are here, and the policy on bad numbers
(`nonfinite/policy.py`). What does not go together is refused as each is made.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicator.base.host.paths import checked_path
from replicator.base.types import Dataset, PyTree
from replicator.checkpoint.retention import Retention
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_function,
    check_kind,
)
from replicator.inputs.adapters import check_read_anew
from replicator.training.best_metric import Follow
from replicator.training.hooks.schedule import Every, every
from replicator.training.reports.profiler import check_steps

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where and when a run is saved.

    Attributes:
      directory: Holds the checkpoints of this run and of no other.
      when: At which steps; the last step is saved, too.
      retention: Which of them stay.
    """

    directory: Path
    when: Every
    retention: Retention


def checkpointing_of(given: Mapping[str, Any]) -> Checkpointing | None:
    """Return where the arguments of a run say that it is saved; None for nowhere.

    Raises:
      ArgumentError: One is of a wrong kind, or given without a directory.
    """
    directory, retention = given["checkpoint_dir"], given["retention"]
    check_kind("retention", retention, Retention)
    if directory is None:
        if retention is not None:
            raise ArgumentError(
                "`checkpoint_dir` must be given with `retention`, got None. Pass it, "
                "or leave `retention` out."
            )
        return None
    return Checkpointing(
        when=_as_schedule("checkpoint_every", given["checkpoint_every"]),
        directory=checked_path("checkpoint_dir", directory),
        retention=retention or Retention(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluating:
    """What a run evaluates, and when.

    Attributes:
      eval_fn: As in `rep.evaluate`.
      dataset: Read anew each time; several by their names.
      when: At which steps; the last one is evaluated, too.
      follow: The number that tells the best step, and when to give up.
    """

    eval_fn: EvalFn
    dataset: Dataset | Mapping[str, Dataset]
    when: Every
    follow: Follow | None

    def found_by(
        self,
        evaluation_of: Callable[[EvalFn], Evaluation],
        state: PyTree,
        **options: Any,
    ) -> Mapping[str, PyTree]:
        """Return the metrics of the dataset, or of each of them under its name.

        Args:
          evaluation_of: Returns what evaluates by a function.
          state: The user's.
          **options: Of the evaluation's call.
        """
        evaluation = evaluation_of(self.eval_fn)
        if not isinstance(self.dataset, Mapping):
            return evaluation(state, self.dataset, **options)
        # In one order: processes may have put their dicts together in others.
        return {
            name: evaluation(state, self.dataset[name], **options)
            for name in sorted(self.dataset)
        }


def evaluating_of(given: Mapping[str, Any]) -> Evaluating | None:
    """Return what the arguments of a run say that it evaluates; None for nothing.

    Raises:
      ArgumentError: Some are given without the others, or one is of a wrong kind.
    """
    follow = given["follow"]
    check_kind("follow", follow, Follow)
    names = ("eval_fn", "eval_dataset", "eval_every")
    missing = [name for name in names if given[name] is None]
    if len(missing) == 3 and follow is None:
        return None
    if missing:
        raise ArgumentError(
            "`eval_fn`, `eval_dataset` and `eval_every` must be given together, "
            f"got no `{missing[0]}`. Pass it, or leave all out."
        )
    check_function("eval_fn", given["eval_fn"], "state, batch")
    _check_datasets(given["eval_dataset"])
    return Evaluating(
        eval_fn=given["eval_fn"],
        dataset=given["eval_dataset"],
        when=_as_schedule("eval_every", given["eval_every"]),
        follow=follow,
    )


def _check_datasets(given: Dataset | Mapping[str, Dataset]) -> None:
    if not isinstance(given, Mapping):
        check_read_anew("eval_dataset", given)
        return
    named = all(isinstance(name, str) and name and "/" not in name for name in given)
    if not (given and named):
        raise ArgumentError(
            "`eval_dataset` must name each of several datasets by a word without `/`, "
            f'got {list(given)}. Write `{{"val": ..., "test": ...}}`.'
        )
    for name, dataset in given.items():
        check_read_anew(f"eval_dataset[{name!r}]", dataset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What a run tells, and where.

    Attributes:
      directory: Where metrics, `run.json` and the journal go; None for nowhere.
      write_every: Steps between written metrics.
      display: Whether progress is shown on standard error.
      profile: Steps to trace; None for none.
    """

    directory: Path | None
    write_every: int
    display: bool
    profile: range | None


def recording_of(given: Mapping[str, Any]) -> Recording:
    """Return what the arguments of a run say that it tells.

    Raises:
      ArgumentError: One is of a wrong kind, or there is no place for a trace.
    """
    write_every, display = given["write_every"], given["display"]
    check_count("write_every", write_every)
    check_flags(gradient_norm=given["gradient_norm"], display=display)
    directory = checked_path("directory", given["directory"])
    if (profile := given["profile"]) is not None:
        check_steps("profile", profile)
        if directory is None:
            raise ArgumentError(
                "`directory` must be given to profile steps, got None. Pass it: traces "
                "go to `profile/` in it."
            )
        if given["steps"] is not None and profile.start > given["steps"]:
            _log.warning(
                "No step of `profile=%s` is traced: the last step is %d.",
                profile,
                given["steps"],
            )
    return Recording(
        directory=directory, write_every=write_every, display=display, profile=profile
    )


def _as_schedule(name: str, when: int | Every) -> Every:
    """Return the schedule that the argument `name` stands for."""
    if isinstance(when, Every):
        return when
    check_count(name, when)
    return every(n_steps=when)
