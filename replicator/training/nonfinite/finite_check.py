"""Find the first NaN or infinity among metrics, without a transfer for each step.

Metrics are kept on the devices and checked together: when the loop calls `check`, which
it does when metrics are read anyway, and at least every 64 calls.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.training.nonfinite.policy import BadNumber
from replicator.training.to_host import to_host

CALLS_BETWEEN_CHECKS = 64


class FiniteCheck:
    """Keeps metrics until they are checked.

    >>> check = FiniteCheck(lambda bad: print(bad.step, bad.leaf, bad.found))
    >>> check.admit({"loss": float("nan")}, first_step=7, stacked=False)
    >>> check.check()
    7 loss nan

    Args:
      report: Called with each step that has a bad metric, in order.
    """

    def __init__(self, report: Callable[[BadNumber], None]) -> None:
        self._report = report
        self._unchecked: list[_Unchecked] = []

    def admit(self, metrics: PyTree, *, first_step: int, stacked: bool) -> None:
        """Keep the metrics of one call; check all if there are many.

        Args:
          metrics: Arrays, on devices or not. Only scalars and vectors are kept: images
            among the metrics are not checked.
          first_step: Step of the metrics, or of their first entries.
          stacked: Whether each metric has a leading axis of several steps.

        Raises:
          Exception: As `check`.
        """
        leaves, structure = jax.tree.flatten(metrics)
        most_axes = 2 if stacked else 1
        kept = {i: leaf for i, leaf in enumerate(leaves) if np.ndim(leaf) <= most_axes}
        self._unchecked.append(_Unchecked(first_step, stacked, kept, structure))
        if len(self._unchecked) >= CALLS_BETWEEN_CHECKS:
            self.check()

    def check(self) -> None:
        """Check all metrics since the last check.

        Raises:
          Exception: Any error of `report`.
        """
        unchecked, self._unchecked = self._unchecked, []
        fetched = to_host([call.leaves for call in unchecked])
        for call, leaves in zip(unchecked, fetched, strict=True):
            if not all(map(_is_finite, leaves.values())):
                for found in _bad_numbers(call, leaves):
                    self._report(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Unchecked:
    first_step: int
    stacked: bool
    leaves: dict[int, Any]
    structure: Any


def _bad_numbers(
    call: _Unchecked, leaves: dict[int, np.ndarray]
) -> Iterator[BadNumber]:
    """List the steps of a call that have a bad metric, each with the first one."""
    rows = {
        i: np.asarray(leaf) if call.stacked else [leaf] for i, leaf in leaves.items()
    }
    firsts: dict[int, int] = {}
    for which, steps in rows.items():
        for index, entries in enumerate(steps):
            if not _is_finite(entries):
                firsts.setdefault(index, which)
    for index, which in sorted(firsts.items()):
        entries = np.ravel(rows[which][index])
        yield BadNumber(
            kind="nonfinite",
            step=call.first_step + index,
            leaf=_name(call, which),
            found=str(entries[~np.isfinite(entries)][0]),
        )


def _is_finite(entries: np.ndarray) -> bool:
    # Ten times as fast as NumPy for scalars: this runs for each metric of each step.
    if np.ndim(entries) == 0:
        return math.isfinite(entries)
    return bool(np.isfinite(entries).all())


def _name(call: _Unchecked, which: int) -> str:
    numbered = jax.tree.unflatten(call.structure, range(call.structure.num_leaves))
    return named_leaves(numbered)[which][0] or "metric"
