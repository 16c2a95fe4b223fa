"""Say where an input is, so that another run goes on with the example after it.

Pipelines go in step, a global batch at a time, so one count says where all of them are,
also for another number of pipelines. What an iterator tells of itself (grain's do) is
kept as well: with it a pipeline goes on at once, without it by reading what was read.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replicator.errors import BatchError
from replicator.inputs.adapters import Source
from replicator.protocols import PyTree

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place between two batches of an input.

    Attributes:
      batches: Global batches read before it.
      examples: Real examples in them, of all processes.
      epoch: Passes over the dataset that have ended.
      epoch_batches: Global batches read in the pass after those.
      full_batch: Examples in a full global batch; the next may be a short one.
      num_pipelines: How many pipelines read it, in all processes.
      states: What each pipeline's iterator told of itself, if it does: those of this
        process where it was read; those of all, in order, where it is restored.
    """

    batches: int = 0
    examples: int = 0
    epoch: int = 0
    epoch_batches: int = 0
    full_batch: int = 0
    num_pipelines: int = 1
    states: tuple[Any, ...] = ()

    def of_pipelines(self, indices: Sequence[int], count: int) -> "Position":
        """Return it with the states of those pipelines, if they are for as many."""
        fits = len(self.states) == count
        states = tuple(self.states[index] for index in indices) if fits else ()
        return dataclasses.replace(self, states=states)

    def as_json(self) -> dict[str, Any]:
        """Return plain values that `position_from_json` takes."""
        return dataclasses.asdict(self) | {"states": list(self.states)}


def position_from_json(value: Mapping[str, Any]) -> Position:
    """Return the position that `as_json` wrote."""
    return Position(**{**value, "states": tuple(value["states"])})


def tell(passes: Sequence[Iterator[PyTree]]) -> tuple[Any, ...]:
    """Ask each pass where it is; empty unless all can say so in plain values."""
    states = tuple(_state_of(batches) for batches in passes)
    return states if all(state is not None for state in states) else ()


def start_at(sources: Sequence[Source], position: Position) -> list[Iterator[PyTree]]:
    """Begin the pass that `position` lies in, after the batches before it.

    Args:
      sources: One for each pipeline.
      position: Where a run before was.

    Returns:
      A pass for each pipeline.

    Raises:
      BatchError: The dataset no longer holds as many batches.
    """
    if position.batches == 0:
        return [source.start() for source in sources]
    if not all(source.same_passes for source in sources):
        for _ in range(position.epoch):
            _exhaust(sources)
    passes = [source.start() for source in sources]
    if len(position.states) == len(passes):
        for batches, state in zip(passes, position.states, strict=True):
            batches.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
        return passes
    if all(source.seek for source in sources):
        return [source.seek(position.epoch_batches) for source in sources]  # pyright: ignore
    _log.warning(
        "Going on after batch %d by reading all before it again: `dataset` cannot say "
        "where it is. Hand over a grain dataset or a list to go on at once.",
        position.batches,
    )
    for batches in passes:
        _skip(batches, position)
    return passes


def _state_of(batches: Iterator[PyTree]) -> Any:
    """Return a state that JSON can hold, or None."""
    if not (hasattr(batches, "get_state") and hasattr(batches, "set_state")):
        return None
    state = batches.get_state()  # pyright: ignore[reportAttributeAccessIssue]
    return state if isinstance(state, Mapping) else None


def _exhaust(sources: Sequence[Source]) -> None:
    for source in sources:
        for _ in source.start():
            pass


def _skip(batches: Iterator[PyTree], position: Position) -> None:
    wanted = position.epoch_batches
    found = sum(1 for _ in itertools.islice(batches, wanted))
    # Of several pipelines one may have ended before the others.
    if found < wanted and position.num_pipelines == 1:
        raise BatchError(
            f"`dataset` must hold the {wanted} batches that were read before, got its "
            f"end after {found}. Resume with the dataset that the run began with."
        )
