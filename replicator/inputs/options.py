"""Options of an input, checked when they are made."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from replicator.base.tracebacks import short_tracebacks
from replicator.errors import (
    ArgumentError,
    check_counts,
    check_flags,
    check_positive,
    check_word,
)
from replicator.inputs.adapters import Adapter
from replicator.inputs.checks import Shapes
from replicator.inputs.context import InputMode
from replicator.inputs.position import Reread
from replicator.inputs.remainder import Remainder

DEFAULT_PREFETCH = 2
_MOST_SMALL_BYTES, _MOST_SMALL = 2**20, 32


@short_tracebacks
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """Options of reading, checking and placing a dataset.

    Attributes:
      accumulate: Microbatches per update.
      steps_per_call: Consecutive batches stacked for one call of the compiled step. The
        last stack of a finite input may hold fewer.
      steps: Batches to read in all; `None` reads all.
      epochs: Passes over the dataset; `None` repeats it without end if possible.
      mode: Scope of a pipeline. An input function is called once for each. Any other
        dataset yields global batches, the same in every process, of which each process
        takes its rows.
      remainder: Treatment of an uneven last batch: "mask", "drop" or "refuse". Under
        "mask" and "drop" batches that are dicts have a leaf `mask`.
      shapes: The few forms that batches may have, if their shapes change: for each,
        the shape of a row by the path of its leaf, `{"tokens": (64,)}`. The step is
        compiled once for each form that occurs.
      allow_nan: Whether to accept batches that hold NaN.
      reread: Action of a resumed run that reads its input again up to its position, and
        finds other batches than before: "refuse", or "warn".
      prefetch: Number of placed items kept ready; the thread holds one more. By default
        2; if the dataset can be iterated again and its batches are small, as many as
        make a mebibyte, at most 32.
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
        remedy = "Use `float('inf')` to wait without a limit."
        check_positive("timeout_s", self.timeout_s, remedy)
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
    """Refuse `shapes` where batches are joined.

    >>> refuse_shapes(InputOptions(), "here")

    Raises:
      ArgumentError: `shapes` are given.
    """
    if options.shapes:
        raise ArgumentError(
            f"`inputs.shapes` must be left out {where}, got {len(options.shapes)} "
            "forms. Give each form a dataset of its own, or pad to one form."
        )


def small_prefetch(nbytes: int) -> int:
    """Return the default `prefetch` for items of `nbytes` that can be read again.

    >>> small_prefetch(2**17)
    8
    """
    most = _MOST_SMALL_BYTES // max(nbytes, 1)
    return min(max(most, DEFAULT_PREFETCH), _MOST_SMALL)
