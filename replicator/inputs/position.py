"""The position of an input, so that a resumed run continues with the next example.

All pipelines read a global batch at a time, so one count is the position of all of
them, also for another number of pipelines. States of iterators (grain has them) are
kept as well: with a state a pipeline resumes at once, without it by reading the batches
before it again, whose checksums show whether they are the same.
"""

import collections
import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from replicator.base.types import PyTree
from replicator.errors import BatchError
from replicator.inputs.adapters import Source
from replicator.inputs.checksums import checksum

Reread: TypeAlias = Literal["refuse", "warn"]
"""Action of a run that finds other batches than it read before."""

_MOST_PASSES = 100  # passes whose first batch's checksum is kept
_Known: TypeAlias = tuple[int, int, int | None]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
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
      num_pipelines: Number of pipelines that read it, in all processes.
      states: State of each pipeline's iterator, if it has one: those of this process
        when it was read; those of all, in order, when it is restored.
      checksums: For each pipeline, likewise, the checksums of the first batch of each
        pass, and of the last batch: its pass, its place in it, and the checksum; None
        if unknown.
    """

    batches: int = 0
    examples: int = 0
    epoch: int = 0
    epoch_batches: int = 0
    full_batch: int = 0
    num_pipelines: int = 1
    states: tuple[Any, ...] = ()
    checksums: tuple[tuple[_Known, ...], ...] = ()

    def of_pipelines(self, indices: Sequence[int], count: int) -> "Position":
        """Return it with the states of the given pipelines, if it was of `count`.

        >>> Position(states=("a", "b")).of_pipelines([1], 2).states
        ('b',)
        """

        def chosen(entries: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(entries[index] for index in indices if len(entries) == count)

        states, checksums = chosen(self.states), chosen(self.checksums)
        return dataclasses.replace(self, states=states, checksums=checksums)

    def checksums_after(
        self, found: Sequence[int | None]
    ) -> tuple[tuple[_Known, ...], ...]:
        """Return `checksums` after one more batch; `found` has one per pipeline.

        >>> Position().checksums_after([7])
        (((0, 0, 7),),)
        """
        before = self.checksums or [()] * len(found)
        return tuple(
            (
                *[first for first in known if first[1] == 0][:_MOST_PASSES],
                (self.epoch, self.epoch_batches, crc32),
            )
            for known, crc32 in itertools.zip_longest(before, found)
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values that `position_from_json` takes.

        >>> Position(batches=3).as_json()["batches"]
        3
        """
        return dataclasses.asdict(self) | {"states": list(self.states)}


def position_from_json(value: Mapping[str, Any]) -> Position:
    """Return the position that `as_json` wrote.

    >>> position_from_json(Position(batches=3).as_json()) == Position(batches=3)
    True
    """
    found = value.get("checksums", ())  # early versions had none
    checksums = tuple(tuple(map(tuple, each)) for each in found)
    states = tuple(value["states"])
    return Position(**{**value, "states": states, "checksums": checksums})


def other_size(found: int, saved: int) -> BatchError:
    """Return the error of a run that resumes with global batches of another size."""
    return BatchError(
        f"`dataset` must yield batches of {saved} examples, with which the run was "
        f"saved, got {found}. Go on with those, which any number of devices may share, "
        "or begin anew in another `checkpoint_dir`."
    )


def states_of(passes: Sequence[Iterator[PyTree]]) -> tuple[Any, ...]:
    """Return the state of each pass; empty unless all have one in plain values.

    >>> states_of([iter([])])
    ()
    """
    states = tuple(_state_of(batches) for batches in passes)
    return states if all(state is not None for state in states) else ()


def start_at(
    sources: Sequence[Source], position: Position, reread: Reread = "refuse"
) -> list[Iterator[PyTree]]:
    """Begin the pass that `position` lies in, after the batches before it.

    >>> source = Source(start=lambda: iter([1, 2, 3]), repeats=True, same_passes=True)
    >>> list(start_at([source], Position(batches=1, epoch_batches=1))[0])
    [2, 3]

    Args:
      sources: One source for each pipeline.
      position: Position of the run before.
      reread: Action if the batches before it are others.

    Returns:
      A pass for each pipeline.

    Raises:
      BatchError: The dataset no longer holds as many batches, or it holds others.
    """
    if not (position.epoch_batches or position.states):
        return [source.begin(position.epoch) for source in sources]
    again = [_Again(position, each, reread) for each in range(len(sources))]
    if not all(source.same_passes for source in sources):
        for number in range(position.epoch):
            for source, known in zip(sources, again, strict=True):
                collections.deque(known.read(source.begin(number), number), maxlen=0)
    passes = [source.begin(position.epoch) for source in sources]
    if len(position.states) == len(passes):
        for batches, state in zip(passes, position.states, strict=True):
            _restore(batches, state)
        return passes
    if not all(source.same_passes for source in sources):
        _log.warning(
            "Going on after batch %d by reading all before it again: `dataset` has no "
            "position. Pass a grain dataset or a list to go on at once.",
            position.batches,
        )
    for batches, known in zip(passes, again, strict=True):
        known.skip(batches)
    return passes


def _state_of(batches: Iterator[PyTree]) -> Any:
    """Return a state that JSON can hold, or None."""
    if not (hasattr(batches, "get_state") and hasattr(batches, "set_state")):
        return None
    state = batches.get_state()  # pyright: ignore[reportAttributeAccessIssue]
    is_grain = type(batches).__module__.partition(".")[0] == "grain"
    if isinstance(state, bytes) and is_grain:  # JSON, of its `DataLoader`
        return state.decode(errors="replace")
    return state if isinstance(state, Mapping) else None


def _restore(batches: Iterator[PyTree], state: Any) -> None:
    if isinstance(state, str):
        # grain compares the `repr` of its sampler and source, which holds a memory
        # address if the user's class has no `repr` of its own: take the current ones.
        saved, now = json.loads(state), json.loads(_state_of(batches))
        same = {
            name: value
            for name, value in now.items()
            if _ADDRESS.sub("", str(value)) == _ADDRESS.sub("", str(saved.get(name)))
        }
        state = json.dumps(saved | same).encode()
    batches.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]


class _Again:
    """Reads batches of one pipeline again, and checks whether they are the same."""

    def __init__(self, position: Position, pipeline: int, reread: Reread) -> None:
        known = position.checksums[pipeline] if position.checksums else ()
        self._known = {(number, place): crc32 for number, place, crc32 in known}
        self._position = position
        self._reread: Reread = reread

    def read(self, batches: Iterator[PyTree], number: int) -> Iterator[PyTree]:
        """Read a pass, by its number."""
        for place, batch in enumerate(batches):
            crc32 = self._known.get((number, place))
            if crc32 is not None and checksum(batch) not in (crc32, None):
                self._require_size(batch, place)
                self._report(f"batch {place} of pass {number}")
            yield batch

    def skip(self, batches: Iterator[PyTree]) -> None:
        """Read the batches of the last pass that were read before."""
        number, wanted = self._position.epoch, self._position.epoch_batches
        again = itertools.islice(self.read(batches, number), wanted)
        found = sum(1 for _ in again)
        # With several pipelines, one may have ended before the others.
        crc32 = self._known.get((number, wanted - 1))
        ended = self._position.num_pipelines > 1 and crc32 is None
        if found < wanted and not ended:
            raise BatchError(
                f"`dataset` must hold the {wanted} batches that were read before, got "
                f"its end after {found}. Resume with the dataset that the run began "
                "with."
            )

    def _require_size(self, batch: PyTree, place: int) -> None:
        saved, pipelines = self._position.full_batch, self._position.num_pipelines
        found = len(next(iter(jax.tree.leaves(batch)), ())) * pipelines
        if place == 0 and saved and found != saved:  # the last of a pass may be short
            raise other_size(found, saved)

    def _report(self, which: str) -> None:
        found = (
            f"`dataset` must yield again what the run read before, got another {which}."
        )
        if self._reread == "refuse":
            raise BatchError(
                f"{found} Seed its shuffle in `input_fn(context)`, or take other "
                'examples: `inputs=InputOptions(reread="warn")`.'
            )
        _log.warning("%s The run goes on with other examples.", found)
