"""Decide what happens when a number goes bad: a pure machine, driven by `rollback`.

Metrics are merged over replicas, so all processes of a run see the same event and
decide the same. The history is small and plain, and saved in checkpoints: a resumed run
knows how often it went back, and which batches to leave out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from replicator.errors import check_count, check_word

OnNonfinite: TypeAlias = Literal["raise", "ignore", "skip", "rollback"]
"""Action on NaN or infinity among a step's metrics."""

OnSpike: TypeAlias = Literal["log", "raise", "rollback"]
"""Action on a spike of a metric."""

OnMismatch: TypeAlias = Literal["raise", "rollback"]
"""Action on a leaf whose copies on several devices are not equal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPolicy:
    """Actions of a run on bad numbers.

    Attributes:
      on_nonfinite: `"raise"` ends the run; `"ignore"` goes on; `"skip"` goes on, as the
        step itself left the update out; `"rollback"` goes back to the last good
        checkpoint and leaves the batch out.
      on_spike: `"log"` logs it, `"raise"` ends the run, `"rollback"` as above.
      on_mismatch: Action on copies that differ: `"raise"` ends the run; `"rollback"`
        goes back to the last checkpoint, and leaves no batch out.
      max_rollbacks: Most rollbacks without a new checkpoint in between.
      max_skips: Most updates skipped one after the other.

    Raises:
      ArgumentError: A choice is unknown, or a number is below 1.
    """

    on_nonfinite: OnNonfinite = "raise"
    on_spike: OnSpike = "log"
    on_mismatch: OnMismatch = "raise"
    max_rollbacks: int = 10
    max_skips: int = 50

    def __post_init__(self) -> None:
        check_word("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_word("on_spike", self.on_spike, get_args(OnSpike))
        check_word("on_mismatch", self.on_mismatch, get_args(OnMismatch))
        check_count("max_rollbacks", self.max_rollbacks)
        check_count("max_skips", self.max_skips)

    @property
    def goes_back(self) -> bool:
        """True if the run may go back, for which it needs checkpoints."""
        return "rollback" in (self.on_nonfinite, self.on_spike, self.on_mismatch)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """History of bad numbers: the state of the machine.

    Attributes:
      rollbacks: Number of times that the run went back to `back_to`, or before it.
      back_to: Last step from which the run went on after a rollback.
      left_out: Calls whose batches are left out, by the index of their first batch.
      skips_in_a_row: Updates skipped one after the other, up to `last_skip`.
      last_skip: Step that was skipped last.
    """

    rollbacks: int = 0
    back_to: int = -1
    left_out: tuple[int, ...] = ()
    skips_in_a_row: int = 0
    last_skip: int = 0


def history_from_json(value: Mapping[str, Any]) -> History:
    """Return the history from JSON.

    >>> history_from_json({"rollbacks": 1, "left_out": [40]}).left_out
    (40,)
    """
    return History(**{**value, "left_out": tuple(value["left_out"])})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadNumber:
    """A metric that is NaN or infinite, or has leapt, or a leaf with unequal copies.

    Attributes:
      kind: `"nonfinite"`, `"spike"` or `"mismatch"`.
      step: Step of the metric, counted from 1, or of the state.
      leaf: Name of the metric, or path of the leaf.
      found: Value as text: "nan", "7.1 where 2 is usual", "other bits on replica 3".
      call: Index of the first batch of the call that made the step; None if that is not
        known any more.
    """

    kind: Literal["nonfinite", "spike", "mismatch"]
    step: int
    leaf: str
    found: str
    call: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reaction:
    """Reaction to a bad number, in this order; none by default.

    Attributes:
      note: Event to write into the run's journal; None writes nothing.
      goes_back: Whether to delete all checkpoints from the step on, and resume from the
        one before.
      stop: Message of the error that ends the run; None if it goes on.
    """

    note: Literal["skipped", "spike"] | None = None
    goes_back: bool = False
    stop: str | None = None


def decide(
    policy: RecoveryPolicy, history: History, event: BadNumber
) -> tuple[History, Reaction]:
    """Decide what a bad number leads to.

    >>> bad = BadNumber(kind="nonfinite", step=7, leaf="loss", found="nan", call=6)
    >>> decide(RecoveryPolicy(on_nonfinite="rollback"), History(), bad)[1].goes_back
    True

    Args:
      policy: Actions that the user chose.
      history: History of bad numbers.
      event: The bad number.

    Returns:
      The history with this event, and the action.
    """
    if event.kind == "spike":
        return _after_spike(policy, history, event)
    if event.kind == "mismatch":
        # No batch did it: none is left out.
        if policy.on_mismatch == "rollback":
            return history, Reaction(goes_back=True)
        return history, Reaction(stop=_stop(event))
    match policy.on_nonfinite:
        case "ignore":
            return history, Reaction()
        case "skip":
            return _after_skip(policy, history, event)
        case "rollback":
            return _go_back(history, event)
        case _:
            return history, Reaction(stop=_stop(event))


def resume_at(
    policy: RecoveryPolicy, history: History, event: BadNumber, *, start_step: int
) -> tuple[History, Reaction]:
    """Count a rollback, now that all processes know the checkpoint to resume from.

    >>> bad = BadNumber(kind="nonfinite", step=7, leaf="loss", found="nan", call=6)
    >>> resume_at(RecoveryPolicy(), History(), bad, start_step=5)[0].rollbacks
    1

    Args:
      policy: Actions that the user chose.
      history: History with the event.
      event: The bad number for which the run went back.
      start_step: Step to resume from. A later step than the last time is progress.

    Returns:
      The history with this rollback, and the action.
    """
    if start_step > history.back_to:
        history = dataclasses.replace(history, rollbacks=0, back_to=start_step)
    if history.rollbacks < policy.max_rollbacks:
        return dataclasses.replace(history, rollbacks=history.rollbacks + 1), Reaction()
    kept = tuple(call for call in history.left_out if call != event.call)
    after = f", after {history.rollbacks} rollbacks without a new checkpoint"
    return dataclasses.replace(history, left_out=kept), Reaction(
        stop=_stop(event, after)
    )


def _after_spike(
    policy: RecoveryPolicy, history: History, event: BadNumber
) -> tuple[History, Reaction]:
    if policy.on_spike == "log":
        return history, Reaction(note="spike")
    if policy.on_spike == "raise":
        return history, Reaction(note="spike", stop=_stop(event))
    history, outcome = _go_back(history, event)
    return history, dataclasses.replace(outcome, note="spike")


def _after_skip(
    policy: RecoveryPolicy, history: History, event: BadNumber
) -> tuple[History, Reaction]:
    follows = event.step == history.last_skip + 1
    in_a_row = history.skips_in_a_row + 1 if follows else 1
    history = dataclasses.replace(
        history, skips_in_a_row=in_a_row, last_skip=event.step
    )
    if in_a_row < policy.max_skips:
        return history, Reaction(note="skipped")
    stop = _stop(event, f", the {in_a_row}th update in a row")
    return history, Reaction(note="skipped", stop=stop)


def _go_back(history: History, event: BadNumber) -> tuple[History, Reaction]:
    if event.call is None or event.call in history.left_out:
        # Leaving the batch out is impossible, or did not help before.
        return history, Reaction(stop=_stop(event, ", and its batch is not known"))
    left_out = tuple(sorted({*history.left_out, event.call}))
    return dataclasses.replace(history, left_out=left_out), Reaction(goes_back=True)


def _stop(event: BadNumber, after: str = "") -> str:
    """Return the message of the error that ends a run."""
    look = "Look at the batch and the learning rate, or pass"
    rule, remedy = {
        "nonfinite": ("be finite", f'{look} `on_nonfinite="ignore"`'),
        "spike": ("stay in its range", f'{look} `Spikes(action="log")`'),
        "mismatch": (
            "be equal on all devices that hold it",
            "Start again without that device: a saved run goes on from its last "
            "checkpoint",
        ),
    }[event.kind]
    return (
        f"`{event.leaf}` must {rule}, got {event.found} at step {event.step}{after}. "
        f"{remedy}."
    )
