"""Evaluate a run's state every so often, and at its end: a hook of the loop."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from replicator.base.types import PyTree
from replicator.engine.step.state import RunState
from replicator.errors import ArgumentError, check_function, check_kind
from replicator.hooks.protocol import Hook, StateEvent
from replicator.hooks.schedule import Every, Trigger
from replicator.monitoring.result_json import result_as_json, result_from_json
from replicator.training.best_metric import BestSoFar, Evaluated, Follow
from replicator.writers.multi import Multi
from replicator.writers.writer import Writer, check_writer, named_numbers


class EvaluationLeft(Exception):
    """Ends an evaluation before its end, as the run is asked to stop; no error."""


class EvaluateEvery(Hook):
    """Evaluate the state when due, and once more at the end if the last was not.

    Numbers are written as `eval/<name>`. The state is evaluated before the next step
    takes it over; the loop waits meanwhile.

    Args:
      evaluate: Takes the user's state, returns a dict of metrics: for example `lambda
        state: rep.evaluate(eval_fn, dataset, state=state)`.
      when: At which steps.
      writer: Where numbers go; closed with the run. None writes nothing.
      follow: Which number has a best, and when patience ends.
      best: What an earlier part of this run had found.

    Raises:
      ArgumentError: An argument is of a wrong kind.
    """

    phase = "evaluate"

    def __init__(
        self,
        evaluate: Callable[[PyTree], Mapping[str, PyTree]],
        when: Every,
        *,
        writer: Writer | None = None,
        follow: Follow | None = None,
        best: BestSoFar | None = None,
        tell: Callable[..., None] | None = None,
    ) -> None:
        check_function("evaluate", evaluate, "state")
        check_kind("follow", follow, Follow)
        check_kind("best", best, BestSoFar)
        if writer is not None:
            check_writer("writer", writer)
        self._evaluate = evaluate
        self._trigger = Trigger(when)
        self._writer = Multi() if writer is None else writer
        self._follow = follow
        self._followed = follow and [follow.metric, follow.goal]
        self._tell = tell
        self._last_step: int | None = None
        self._owed_step: int | None = None  # whose evaluation was left
        self.best = best or BestSoFar()
        self.metrics: Mapping[str, PyTree] | None = None
        self._plain_metrics: list[dict[str, Any]] | None = None

    @property
    def should_stop(self) -> bool:
        """Whether patience has ended."""
        return self._follow is not None and self._follow.is_over(self.best)

    def numbers_of(self, step: int) -> dict[str, float]:
        """Return what was found after a step, as `eval/<name>`; perhaps nothing."""
        if step != self._last_step or self.metrics is None:
            return {}
        numbers = named_numbers(self.metrics)
        return {f"eval/{name}": number for name, number in numbers.items()}

    def on_state(self, event: StateEvent) -> None:
        """Evaluate if due; an evaluation that is left is owed."""
        if self._trigger.pulled(event):
            with contextlib.suppress(EvaluationLeft):
                self._run(event)

    def on_end(self, event: StateEvent) -> None:
        """Evaluate the last state, unless that was done.

        Raises:
          EvaluationLeft: This is not the end yet.
        """
        if event.step != self._last_step:
            self._run(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was found so far, and how long ago it was due."""
        best = self.best
        return {
            "last_step": self._last_step,
            "owed_step": self._owed_step,
            "followed": self._followed,
            "best_step": best.step,
            # A word: JSON has no infinity.
            "best_value": None if best.value is None else repr(float(best.value)),
            "waited": best.waited,
            "due": self._trigger.state_dict(),
            "metrics": self._plain_metrics,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what was found before; of another number there is no best yet."""
        value = state["best_value"]
        self._last_step = state["last_step"]
        self._owed_step = state.get("owed_step")
        if state.get("followed", self._followed) == self._followed:
            self.best = BestSoFar(
                step=state["best_step"],
                value=None if value is None else float(value),
                waited=state["waited"],
            )
        self._plain_metrics = state.get("metrics")
        if self._plain_metrics is not None:
            self.metrics = result_from_json(self._plain_metrics)
        if state["due"] is not None:
            self._trigger.load_state(state["due"])

    def flush(self) -> None:
        """Return when all numbers are on the disk."""
        self._writer.flush()

    def catch_up(self, event: StateEvent) -> bool:
        """Evaluate a restored state, if that is owed; tell whether it was.

        Raises:
          EvaluationLeft: It is owed still.
        """
        is_owed = event.step == self._owed_step
        if is_owed:
            self._run(event)
        return is_owed

    def _run(self, event: StateEvent) -> None:
        step, state = event.step, event.state
        self._owed_step = step
        self.metrics = self._evaluate(
            state.user if isinstance(state, RunState) else state
        )
        self._owed_step = None
        self._plain_metrics = result_as_json(self.metrics)
        self._last_step = step
        numbers = named_numbers(self.metrics)
        self._writer.write(step, self.numbers_of(step))
        if self._tell is not None:
            self._tell("evaluated", step=step, **numbers)
        if self._follow is not None:
            value = followed_number(self.metrics, self._follow.metric)
            happened = Evaluated(step=step, value=value)
            self.best, _ = self._follow.decide(self.best, happened)


def followed_number(metrics: Mapping[str, PyTree], name: str) -> float:
    """Return the number that a run follows.

    Args:
      metrics: Of an evaluation.
      name: `a/b` for one inside another.

    Raises:
      ArgumentError: There is none of that name.
    """
    numbers = named_numbers(metrics)
    if name not in numbers:
        raise ArgumentError(
            "`follow` must name a number of the evaluation, got "
            f"{name!r}. Use one of {', '.join(numbers)}."
        )
    return numbers[name]
