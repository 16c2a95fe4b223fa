"""Protocol of writers, and the names of numbers in all of them."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.errors import ArgumentError

MOST_ENTRIES = 1_024
"""Longer vectors are not written entry by entry."""

NUMBERS = "biufV"
"""Kinds of NumPy dtypes that are numbers; those of `ml_dtypes` are the last."""


_OF_THE_RUN = ("eval", "progress", "goodput", "memory", "compile", "program")


class Writer(Protocol):
    """Writes numbers of steps.

    Laws: rows arrive in the order written; after `flush` others can read them; errors
    are raised, at the latest by `close`; `close` may be called twice.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the numbers of one step."""

    def flush(self) -> None:
        """Return when all that was written can be read."""

    def close(self) -> None:
        """Flush, close files and end threads."""


def check_names(metrics: PyTree) -> None:
    """Raise if metrics of a step have names of the run's own numbers.

    Raises:
      ArgumentError: A metric has one.

    >>> check_names({"loss": 0.5})
    """
    for path, _ in named_leaves(metrics):
        first, slash, _ = path.partition("/")
        if slash and first in _OF_THE_RUN:
            raise ArgumentError(
                f"`metrics` must leave names under `{first}/` to the run, got "
                f"`{path}`. Rename it."
            )


def check_writer(name: str, value: object) -> None:
    """Raise if a value is not a writer.

    Raises:
      ArgumentError: It is not a writer.
    """
    if isinstance(value, type) or not hasattr(value, "write"):
        raise ArgumentError(
            f"`{name}` must be a writer, got {value!r}. Make one: `JSONL(path)`."
        )


def named_numbers(metrics: PyTree, *, max_ndim: int = 1) -> dict[str, float]:
    """Name the numbers in a tree of metrics: `loss`, `grads/norm`, `loss/3`.

    Args:
      metrics: NumPy leaves. A vector (one number for each replica) becomes one number
        for each entry; larger arrays, and vectors of more than `MOST_ENTRIES` (rows of
        a batch), are left out, as complex numbers and strings are.
      max_ndim: 0 leaves vectors out, too.

    >>> named_numbers({"loss": np.float32(0.5), "grads": {"norm": np.arange(2)}})
    {'grads/norm/0': 0.0, 'grads/norm/1': 1.0, 'loss': 0.5}
    """
    numbers: dict[str, float] = {}
    for path, leaf in named_leaves(metrics):
        name, array = path or "metric", np.asarray(leaf)
        if array.dtype.kind not in NUMBERS:
            continue
        if array.ndim == 0:
            numbers[name] = float(array)
        elif array.ndim == 1 <= max_ndim and array.size <= MOST_ENTRIES:
            numbers |= {f"{name}/{i}": float(entry) for i, entry in enumerate(array)}
    return numbers
