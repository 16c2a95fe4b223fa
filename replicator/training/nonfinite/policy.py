"""Decide what happens when a number goes bad: a pure machine, driven by `rollback`.

The metrics that it judges by are merged, so all processes of a run see the same event
and decide the same. What it remembers is small and plain, and travels in checkpoints: a
run that is cut short remembers how often it went back, and which batches to leave out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from replicator.errors import check_count, check_word

OnNonfinite: TypeAlias = Literal["raise", "ignore", "skip", "rollback"]
"""What a NaN or infinity among a step's metrics leads to."""

OnSpike: TypeAlias = Literal["log", "raise", "rollback"]
"""What a spike of a metric leads to."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a run does about bad numbers.

    Attributes:
      on_nonfinite: `"raise"` ends the run; `"ignore"` goes on; `"skip"` goes on, as the
        step itself left the update out; `"rollback"` goes back to the last good
        checkpoint and leaves the batch out.
      on_spike: `"log"` notes it, `"raise"` ends the run, `"rollback"` as above.
      max_rollbacks: So often a run goes back without a new checkpoint in between.
      max_skips: So many updates may be skipped one after the other.

    Raises:
      ArgumentError: A word is unknown, or a number is below 1.
    """

    on_nonfinite: OnNonfinite = "raise"
    on_spike: OnSpike = "log"
    max_rollbacks: int = 10
    max_skips: int = 50

    def __post_init__(self) -> None:
        check_word("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_word("on_spike", self.on_spike, get_args(OnSpike))
        check_count("max_rollbacks", self.max_rollbacks)
        check_count("max_skips", self.max_skips)

    @property
    def goes_back(self) -> bool:
        """Whether anything makes the run go back: then it needs checkpoints."""
        return "rollback" in (self.on_nonfinite, self.on_spike)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What went bad so far: the machine's state.

    Attributes:
      rollbacks: How often the run went back to `back_to`, or to before it.
      back_to: The last step that it went on from after it went back.
      left_out: The calls whose batches are left out, by the index of their first batch.
      skips_in_a_row: Updates skipped one after the other, up to `last_skip`.
      last_skip: The step that was skipped last.
    """

    rollbacks: int = 0
    back_to: int = -1
    left_out: tuple[int, ...] = ()
    skips_in_a_row: int = 0
    last_skip: int = 0


def history_from_json(value: Mapping[str, Any]) -> History:
    """Return the history that was written as JSON."""
    return History(**{**value, "left_out": tuple(value["left_out"])})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadNumber:
    """A metric of a step is NaN or infinite, or has leapt.

    Attributes:
      kind: Which of the two.
      step: The step, counted from 1.
      leaf: The metric.
      found: What it was, in words: "nan", "7.1 where 2 is usual".
      call: The index of the first batch of the call that made the step; None if that is
        not known any more.
    """

    kind: Literal["nonfinite", "spike"]
    step: int
    leaf: str
    found: str
    call: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What is to be done about a bad number, in this order; nothing by default.

    Attributes:
      note: What the run's journal is told that the step was; None tells nothing.
      goes_back: Whether to give up all checkpoints from the step on, and to go on from
        the one before.
      stop: Why the run ends; None if it does not.
    """

    note: Literal["skipped", "spike"] | None = None
    goes_back: bool = False
    stop: str | None = None


def decide(
    policy: Policy, history: History, event: BadNumber
) -> tuple[History, Outcome]:
    """Say what a bad number leads to.

    Args:
      policy: What the user wants.
      history: What went bad before.
      event: What went bad now.

    Returns:
      The history with this event, and what is to be done.
    """
    if event.kind == "spike":
        return _after_spike(policy, history, event)
    match policy.on_nonfinite:
        case "ignore":
            return history, Outcome()
        case "skip":
            return _after_skip(policy, history, event)
        case "rollback":
            return _go_back(history, event)
        case _:
            return history, Outcome(stop=_stop(event))


def come_back(
    policy: Policy, history: History, event: BadNumber, *, start_step: int
) -> tuple[History, Outcome]:
    """Count a rollback, now that all processes know which checkpoint was left.

    Args:
      policy: What the user wants.
      history: With what the event led to.
      event: What the run went back for.
      start_step: Where it goes on. A later step than the last time is progress.

    Returns:
      The history with this rollback, and what is to be done.
    """
    if start_step > history.back_to:
        history = dataclasses.replace(history, rollbacks=0, back_to=start_step)
    if history.rollbacks < policy.max_rollbacks:
        return dataclasses.replace(history, rollbacks=history.rollbacks + 1), Outcome()
    kept = tuple(call for call in history.left_out if call != event.call)
    after = f", after {history.rollbacks} rollbacks without a new checkpoint"
    return dataclasses.replace(history, left_out=kept), Outcome(
        stop=_stop(event, after)
    )


def _after_spike(
    policy: Policy, history: History, event: BadNumber
) -> tuple[History, Outcome]:
    if policy.on_spike == "log":
        return history, Outcome(note="spike")
    if policy.on_spike == "raise":
        return history, Outcome(note="spike", stop=_stop(event))
    history, outcome = _go_back(history, event)
    return history, dataclasses.replace(outcome, note="spike")


def _after_skip(
    policy: Policy, history: History, event: BadNumber
) -> tuple[History, Outcome]:
    follows = event.step == history.last_skip + 1
    in_a_row = history.skips_in_a_row + 1 if follows else 1
    history = dataclasses.replace(
        history, skips_in_a_row=in_a_row, last_skip=event.step
    )
    if in_a_row < policy.max_skips:
        return history, Outcome(note="skipped")
    stop = _stop(event, f", the {in_a_row}th update in a row")
    return history, Outcome(note="skipped", stop=stop)


def _go_back(history: History, event: BadNumber) -> tuple[History, Outcome]:
    if event.call is None or event.call in history.left_out:
        # Whichever batch it was, to leave it out would not help, or not be possible.
        return history, Outcome(stop=_stop(event, ", and its batch cannot be told"))
    left_out = tuple(sorted({*history.left_out, event.call}))
    return dataclasses.replace(history, left_out=left_out), Outcome(goes_back=True)


def _stop(event: BadNumber, after: str = "") -> str:
    """Say why a run ends."""
    rule, option = {
        "nonfinite": ("be finite", '`on_nonfinite="ignore"`'),
        "spike": ("stay in its range", '`Spikes(action="log")`'),
    }[event.kind]
    return (
        f"`{event.leaf}` must {rule}, got {event.found} at step {event.step}{after}. "
        f"Look at the batch and the learning rate, or pass {option}."
    )
