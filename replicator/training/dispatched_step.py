"""One dispatch of a run's step, as the loop keeps it until its metrics are shown."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.hooks.protocol import MetricsEvent
from replicator.monitoring.phases import Phases
from replicator.monitoring.progress import ProgressNumbers
from replicator.training.to_host import to_host


@dataclasses.dataclass(kw_only=True, slots=True)
class DispatchedCall:
    """One dispatch, whose metrics stay on the devices until they are read.

    Attributes:
      last_step: Updates made after it.
      progress: Rates, measured when it was dispatched.
      position: Position of the input after it.
      phases: Phases of the run, which record waiting for the devices.
      metrics: Metrics on the devices; on the host once they were read.
      steps: Updates that it makes.
      stacked: Whether each metric has a leading axis of its steps.
      examples_before: Real examples of all calls before.
      examples: Real examples of this call.
      was_read: Whether the metrics are on the host.
      was_shown: Whether the metrics were shown to hooks.
    """

    last_step: int
    progress: ProgressNumbers
    position: Any
    phases: Phases
    metrics: PyTree = None
    steps: int = 1
    stacked: bool = False
    examples_before: int = 0
    examples: int = 0
    was_read: bool = False
    was_shown: bool = False

    @property
    def first_step(self) -> int:
        """Number of its first step."""
        return self.last_step - self.steps + 1

    def read(self, index: int) -> PyTree:
        """Return the metrics of the call's step number `index`, on the host."""
        if not self.was_read:
            with self.phases.during("step"):
                self.metrics = to_host(self.metrics)
            self.was_read = True
        if not self.stacked:
            return self.metrics
        return jax.tree.map(lambda leaf: leaf[index], self.metrics)

    def last_metrics(self) -> PyTree:
        """Return the metrics of the last step: Python numbers and NumPy arrays."""
        return jax.tree.map(
            lambda leaf: leaf if np.ndim(leaf) else leaf.item(),
            self.read(self.steps - 1),
        )

    def metrics_events(self) -> list[MetricsEvent]:
        """Return the metrics event of each step."""
        return [
            MetricsEvent(
                step=self.first_step + index,
                advanced=1,
                examples=self.examples_before
                + self.examples * (index + 1) // self.steps,
                progress=self.progress,
                read_metrics=partial(self.read, index),
            )
            for index in range(self.steps)
        ]


def joined(
    metrics: PyTree, beside: Mapping[str, PyTree], *, lead: tuple[int, ...]
) -> dict[str, PyTree]:
    """Join the metrics of a step with metrics of the host.

    >>> joined({"loss": 0.5}, {"rate": 0.1}, lead=())
    {'loss': 0.5, 'rate': array(0.1)}

    Args:
      metrics: Metrics of the step. For a name that both have, the step's is taken:
        waiting for the devices waits for one of these.
      beside: Metrics of the host, for one step.
      lead: Leading axis of the step's metrics, if there is one.

    Raises:
      ArgumentError: The step's metrics have no names.
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            "`step_fn` must return a dict of metrics if others are to be joined to "
            f"them, got {type(metrics).__name__}. Name each metric."
        )
    others = {name: each for name, each in beside.items() if name not in metrics}
    return {**metrics} | jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (*lead, *np.shape(leaf))), others
    )
