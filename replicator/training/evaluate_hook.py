"""Hook that evaluates a run's state on a schedule, and at its end."""

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
    """Leaves an evaluation early, as the run was asked to stop; not an error."""


class EvaluateEvery(Hook):
    """Evaluate the state when due, and once more at the end if the last was not.

    Numbers are written as `eval/<name>`. The state is evaluated before it is donated to
    the next step; the loop waits meanwhile.

    Args:
      evaluate: Takes the user's state, returns a dict of metrics: for example `lambda
        state: rep.evaluate(eval_fn, dataset, state=state)`.
      when: Schedule of evaluations.
      writer: Writer of the numbers; closed with the run. None writes nothing.
      follow: Number that ranks the steps, and when to give up.
      best: Best evaluation of an earlier part of this run.
      log: Called as `log("evaluated", step=..., **numbers)`; None logs nothing.

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
        log: Callable[..., None] | None = None,
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
        self._log = log
        self._last_step: int | None = None
        self._owed_step: int | None = None  # step of an evaluation that was left
        self.best = best or BestSoFar()
        self.metrics: Mapping[str, PyTree] | None = None
        self._plain_metrics: list[dict[str, Any]] | None = None

    @property
    def should_stop(self) -> bool:
        """True if patience has ended."""
        return self._follow is not None and self._follow.is_over(self.best)

    def numbers_of(self, step: int) -> dict[str, float]:
        """Return the numbers of a step by `eval/<name>`; empty if not evaluated."""
        if step != self._last_step or self.metrics is None:
            return {}
        numbers = named_numbers(self.metrics)
        return {f"eval/{name}": number for name, number in numbers.items()}

    def on_state(self, event: StateEvent) -> None:
        """Evaluate if due; an evaluation that is left early is caught up later."""
        if self._trigger.pulled(event):
            with contextlib.suppress(EvaluationLeft):
                self._run(event)

    def on_end(self, event: StateEvent) -> None:
        """Evaluate the last state, unless that was done.

        Raises:
          EvaluationLeft: The run was asked to stop: this is not its end.
        """
        if event.step != self._last_step:
            self._run(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the best so far, the last metrics and the state of the schedule."""
        best = self.best
        return {
            "last_step": self._last_step,
            "owed_step": self._owed_step,
            "followed": self._followed,
            "best_step": best.step,
            # A string: JSON has no infinity.
            "best_value": None if best.value is None else repr(float(best.value)),
            "waited": best.waited,
            "due": self._trigger.state_dict(),
            "metrics": self._plain_metrics,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state; the best is dropped if another number is followed now."""
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
        """Wait until all numbers are on the disk."""
        self._writer.flush()

    def catch_up(self, event: StateEvent) -> bool:
        """Evaluate a restored state whose evaluation was left; return whether it was.

        Raises:
          EvaluationLeft: It was left again.
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
        if self._log is not None:
            self._log("evaluated", step=step, **numbers)
        if self._follow is not None:
            value = followed_number(self.metrics, self._follow.metric)
            happened = Evaluated(step=step, value=value)
            self.best, _ = self._follow.decide(self.best, happened)


def followed_number(metrics: Mapping[str, PyTree], name: str) -> float:
    """Return the number that a run follows.

    >>> followed_number({"val": {"loss": 0.5}}, "val/loss")
    0.5

    Args:
      metrics: Metrics of an evaluation.
      name: Name of the number; `a/b` for one inside another.

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
