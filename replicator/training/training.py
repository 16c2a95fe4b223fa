"""What a run is made of: `run` puts it together, and all that serves a run has it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from replicator.base.mesh import spans_processes
from replicator.base.types import Dataset, StepFn
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.engine.first_update.check import FirstUpdateCheck
from replicator.engine.layout import Layout
from replicator.engine.make_step import compiled_step
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import FirstState
from replicator.inputs.options import InputOptions
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases
from replicator.training.hooks.hook import Hook
from replicator.training.loop import Step
from replicator.training.loop_plan import LoopPlan
from replicator.training.node import Node
from replicator.training.nonfinite.rollback import Recovery
from replicator.training.options import Checkpointing, Evaluating, Recording
from replicator.training.watchdog.limits import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """All that a run is made of; nothing of it is open yet.

    Attributes:
      step: Works on a `RunState`; None where a loop has steps of its own.
      step_fn: What one replica does in it; None likewise.
      options: How a step is lifted.
      first: The first state, for a run that was not saved.
      first_updates: How the first updates of its steps are checked; None if not at all.
      dataset: What to train on; None where a loop has batches of its own.
      layout: How replicas lie on devices.
      plan: How long.
      reading: How the dataset is read.
      seed: Of the run's keys.
      arguments: What the records say of the run, in plain JSON.
      recording: What is told.
      checkpointing: Where the run is saved; None saves nothing.
      evaluating: What is evaluated; None for nothing.
      evaluation_of: Returns what evaluates by a function; compiled once.
      events: This process's journal of the run; None for none.
      recovery: What is done about bad numbers.
      hooks: The user's own.
      phases: Where it notes what it is doing.
      limits: How long each of that may take.
      node: Of the program that it runs in; None for none.
    """

    step: Step | None
    step_fn: StepFn | None
    options: CompileOptions
    first: FirstState
    first_updates: FirstUpdateCheck | None
    dataset: Dataset | None
    layout: Layout
    plan: LoopPlan
    reading: InputOptions
    seed: int
    arguments: Mapping[str, Any]
    recording: Recording
    checkpointing: Checkpointing | None
    evaluating: Evaluating | None
    evaluation_of: Callable[[EvalFn], Evaluation]
    events: EventLog | None
    recovery: Recovery
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

    def own_step(self, step_fn: StepFn) -> CompiledStep:
        """Return a step of the loop's own, compiled as those of the run are."""
        return compiled_step(
            step_fn,
            self.layout,
            self.options,
            counted=False,
            phases=self.phases,
            check=self.first_updates,
        )

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Write into the journal, if there is one."""
        if self.events is not None:
            self.events.write(kind, **fields)

    def tell_alike(self, kind: str, /, **fields: Any) -> None:
        """Write what all processes do alike: one of them tells."""
        if not self.together or jax.process_index() == 0:
            self.tell(kind, **fields)
