"""The step that a choice is for: given as functions, or by the file of a problem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from replicator.base.types import InitFn, PyTree, StepFn
from replicator.engine.sharded_step import CompileOptions
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.problem import (
    ProblemFile,
    function_of,
    problem_from,
    random_batch,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A step to find a strategy for.

    Attributes:
      step_fn: Step of one replica.
      init_fn: Makes its first state; None where that is given.
      init_state: The first state, on the host; None where it is made.
      batch: One global batch, on the host.
      decision: The layout that its optimizers refer to.
      options: Options of lifting it.
      seed: Seed of the first state.
      file: Where its functions are from; None where they were given.
    """

    step_fn: StepFn
    init_fn: InitFn | None
    init_state: PyTree = None
    batch: PyTree
    decision: Decision
    options: CompileOptions = field(default_factory=CompileOptions)
    seed: int = 0
    file: "SubjectFile | None" = None

    @property
    def obeys_rules(self) -> bool:
        """Whether its optimizers may obey rules for sums of gradients."""
        return self.file is not None or not self.decision.is_made


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectFile:
    """A subject by the file of its problem: another process imports that.

    Attributes:
      problem: Place of the function that returns the problem.
      make_replicator: `Replicator`.
      batch: One global batch, on the host; None for random numbers.
      options: Options of lifting the step.
      seed: Seed of the first state.
    """

    problem: ProblemFile
    make_replicator: Callable[..., Any]
    batch: PyTree
    options: CompileOptions
    seed: int

    def subject(self, devices: Sequence[Any] | None = None) -> Subject:
        """Import the file, and return the subject that its function makes.

        Args:
          devices: Devices of the `Replicator` that it gets; all by default.

        Raises:
          ArgumentError: The file cannot be imported, or returns no problem.
        """
        rep = self.make_replicator(devices=devices, compilation_cache=False)
        found = problem_from(function_of(self.problem), rep)
        batch = self.batch
        if batch is None:
            batch = random_batch(found.batch, seed=self.seed)
        return Subject(
            step_fn=found.step_fn,
            init_fn=found.init_fn,
            batch=batch,
            decision=rep.decision,
            options=self.options,
            seed=self.seed,
            file=self,
        )
