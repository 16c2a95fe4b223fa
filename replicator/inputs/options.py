"""Collect the choices about an input, and check them at the door."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from replicator.errors import (
    ArgumentError,
    check_counts,
    check_flags,
    check_number,
    check_word,
)
from replicator.inputs.adapters import Adapter
from replicator.inputs.checks import Shapes
from replicator.inputs.context import InputMode
from replicator.inputs.position import Reread
from replicator.inputs.remainder import Remainder

DEFAULT_PREFETCH = 2
_MOST_SMALL_BYTES, _MOST_SMALL = 2**20, 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """How a dataset is read, checked and placed.

    Attributes:
      accumulate: Microbatches per update.
      steps_per_call: Consecutive batches stacked for one call of the compiled step. The
        last stack of a finite input may hold fewer.
      steps: Batches to read in all; `None` reads on while there are any.
      epochs: Passes over the dataset; `None` starts again while it can.
      mode: Who has a pipeline. An input function is called once for each. Any other
        dataset yields global batches, in every process the same, of which each process
        takes its rows.
      remainder: What becomes of an uneven last batch. Under "mask" and "drop"
        batches that are dicts have a leaf `mask`.
      shapes: The few forms that batches may have, where their shapes change: for each,
        the shape of a row by the path of its leaf, `{"tokens": (64,)}`. The step is
        compiled once for each that comes.
      allow_nan: Take batches that hold NaN.
      reread: What becomes of a run that goes on and, where its input is read again up
        to its place, finds other batches than it read before: "refuse", or "warn".
      prefetch: Placed items kept ready; the thread holds one more in its hand. By
        default 2; where the dataset can be iterated again and its batches are small, as
        many as make a mebibyte, at most 32.
      timeout_s: Longest wait for one item, in seconds.
      adapters: Readers for datasets of your own kind.

    Raises:
      ArgumentError: A value breaks its rule.
    """

    accumulate: int = 1
    steps_per_call: int = 1
    steps: int | None = None
    epochs: int | None = None
    mode: InputMode = "per_host"
    remainder: Remainder = "mask"
    shapes: Sequence[Shapes] = ()
    allow_nan: bool = False
    reread: Reread = "refuse"
    prefetch: int | None = None
    timeout_s: float = 600.0
    adapters: tuple[Adapter, ...] = ()

    def __post_init__(self):
        counts = ("accumulate", "steps_per_call", "steps", "epochs", "prefetch")
        check_counts(self, *counts)
        if not isinstance(self.adapters, Iterable):
            raise ArgumentError(
                f"`adapters` must be a list of adapters, got {self.adapters!r}. Put it "
                "in a list."
            )
        object.__setattr__(self, "shapes", _checked_shapes(self.shapes))
        if self.shapes and self.steps_per_call > 1:
            raise ArgumentError(
                "`steps_per_call` must be 1 with `shapes`, got "
                f"{self.steps_per_call}. Leave one of them out."
            )
        check_flags(allow_nan=self.allow_nan)
        check_number("timeout_s", self.timeout_s)
        if not self.timeout_s > 0:
            raise ArgumentError(
                f"`timeout_s` must be positive, got {self.timeout_s}. "
                "Use `float('inf')` to wait without a limit."
            )
        check_word("mode", self.mode, get_args(InputMode))
        check_word("remainder", self.remainder, get_args(Remainder))
        check_word("reread", self.reread, get_args(Reread))


def _checked_shapes(given: Any) -> tuple[dict[str, tuple[int, ...]], ...]:
    try:
        shapes = tuple(
            {path: tuple(map(operator.index, shape)) for path, shape in each.items()}
            for each in given
        )
        alike = len({frozenset(each) for each in shapes}) <= 1 and all(shapes)
    except (TypeError, AttributeError):
        shapes, alike = (), False
    if not alike:
        raise ArgumentError(
            "`shapes` must be a list of dicts, each with shapes of rows of the same "
            f'leaves, got {given!r}. Write `[{{"x": (64,)}}, {{"x": (128,)}}]`.'
        )
    return shapes


def refuse_shapes(options: "InputOptions", where: str) -> None:
    """Refuse shapes that change where batches are joined.

    Raises:
      ArgumentError: There are.
    """
    if options.shapes:
        raise ArgumentError(
            f"`inputs.shapes` must be left out {where}, got {len(options.shapes)} "
            "forms. Give each form a dataset of its own, or pad to one form."
        )


def small_prefetch(nbytes: int) -> int:
    """Return how many items of so many bytes are kept ready where that does no harm."""
    most = _MOST_SMALL_BYTES // max(nbytes, 1)
    return min(max(most, DEFAULT_PREFETCH), _MOST_SMALL)
