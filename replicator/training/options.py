"""What a run is made of, and what can be said of it beside its step and its data.

`run` and `session` take all of it by keyword, and hand it on in three parts:
checkpoints, evaluation, records. Each refuses what does not go together.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from replicator.base.host.paths import checked_path
from replicator.base.mesh import spans_processes
from replicator.base.types import Dataset, PyTree, StepFn
from replicator.checkpoint.retention import Retention
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.evaluation.evaluate import EvalFn
from replicator.engine.layout import Layout
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.state import FirstState
from replicator.errors import (
    ArgumentError,
    check_count,
    check_flags,
    check_function,
    check_kind,
)
from replicator.inputs.adapters import check_read_anew
from replicator.inputs.options import InputOptions
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases
from replicator.training.best_metric import BestSoFar, Follow
from replicator.training.evaluate_hook import EvaluateEvery
from replicator.training.hooks.hook import Hook
from replicator.training.hooks.schedule import Every, every
from replicator.training.loop import Step
from replicator.training.loop_plan import LoopPlan
from replicator.training.node import Node
from replicator.training.nonfinite.rollback import Recovery
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
class Training:
    """All that a run is made of; nothing of it is open yet.

    Attributes:
      step: Works on a `RunState`; None where a loop has steps of its own.
      compile: Lifts a step of such a loop.
      first: The first state, for a run that was not saved.
      dataset: What to train on; None where a loop has batches of its own.
      layout: How replicas lie on devices.
      plan: How long.
      reading: How the dataset is read.
      seed: Of the run's keys.
      arguments: What the records say of the run, in plain JSON.
      recording: What is told.
      checkpointing: Where the run is saved; None saves nothing.
      evaluating: What is evaluated; None for nothing.
      evaluate: `rep.evaluate`.
      events: This process's journal of the run; None for none.
      recovery: What is done about bad numbers.
      one_replica: The step of one replica, to be written down where it fails.
      hooks: The user's own.
      phases: Where it notes what it is doing.
      limits: How long each of that may take.
      node: Of the program that it runs in; None for none.
    """

    step: Step | None
    compile: Callable[[StepFn], CompiledStep]
    first: FirstState
    dataset: Dataset | None
    layout: Layout
    plan: LoopPlan
    reading: InputOptions
    seed: int
    arguments: Mapping[str, Any]
    recording: Recording
    checkpointing: Checkpointing | None
    evaluating: Evaluating | None
    evaluate: Callable[..., Mapping[str, PyTree]]
    events: EventLog | None
    recovery: Recovery
    one_replica: KeyedStep | None
    hooks: Sequence[Hook]
    phases: Phases
    limits: Limits
    node: Node | None

    @property
    def mesh(self) -> Mesh:
        """The devices of the run."""
        return self.layout.mesh

    @property
    def together(self) -> bool:
        """Whether several processes make this run."""
        return spans_processes(self.mesh)

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Write into the journal, if there is one."""
        if self.events is not None:
            self.events.write(kind, **fields)

    def tell_alike(self, kind: str, /, **fields: Any) -> None:
        """Write what all processes do alike: one of them tells."""
        if not self.together or jax.process_index() == 0:
            self.tell(kind, **fields)


def _as_schedule(name: str, when: int | Every) -> Every:
    """Return the schedule that the argument `name` stands for."""
    if isinstance(when, Every):
        return when
    check_count(name, when)
    return every(n_steps=when)
