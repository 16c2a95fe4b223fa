"""What is looked at before trajectories get into a table, and what is counted."""

import collections
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.trajectories.rows import (
    RowForm,
    finite_rows,
    form_of,
)
from replicator.launchpad_bridge.trajectories.table import TrajectoryError

OnNonfinite = Literal["skip", "keep", "raise"]


class Checked(NamedTuple):
    """Trajectories that may be copied into a table: leaves [n, ...]; n may be 0."""

    form: RowForm
    leaves: Sequence[np.ndarray]

    @property
    def num_rows(self) -> int:
        """Return how many they are."""
        return len(self.leaves[0])


class RowChecks:
    """Checks trajectories; all methods may run in several threads at once."""

    def __init__(
        self, like: PyTree, finite: Sequence[str], on_nonfinite: OnNonfinite
    ) -> None:
        """Say what is refused.

        Args:
          like: One trajectory, leaves without the first axis; None: the first is.
          finite: Names of leaves that are to be finite; a name stands for all below.
          on_nonfinite: What happens to a trajectory in which one is not.

        Raises:
          ArgumentError: `like` has no leaf of a name.
        """
        self._finite = tuple(finite)
        self._on_nonfinite = on_nonfinite
        # Of all below. Nothing is waited for, and no other lock taken, under it.
        self._lock = threading.Lock()
        self._looked_at: list[int] = []
        self._refused: collections.Counter[str] = collections.Counter()
        self._nonfinite = 0
        self._form: RowForm | None = None
        if like is not None:
            self._form = self._with_finite(RowForm(like))

    def check(self, trajectories: PyTree, actor: str) -> Checked:
        """Return what of these may be inserted.

        Args:
          trajectories: Leaves [n, ...].
          actor: Whose they are.

        Raises:
          TrajectoryError: They have another form than the first, or are not finite.
          ArgumentError: `finite` has a name that the first ones do not have.
        """
        try:
            with self._lock:
                form = self._form or self._with_finite(form_of(trajectories, actor))
            checked = Checked(form, form.check(trajectories, actor))
            checked = self._finite_of(checked, actor)
            with self._lock:
                if self._form is None:
                    self._form = form
        except TrajectoryError:
            self.count_refused(actor)
            raise
        # Two may have been the first at once: then the later one is checked again.
        return checked if self._form is form else self.check(trajectories, actor)

    def count_refused(self, actor: str) -> None:
        """Count an insert that was refused."""
        with self._lock:
            self._refused[actor] += 1

    def statistics(self) -> dict[str, Any]:
        """Return how many inserts were refused, by actor, and rows not finite."""
        with self._lock:
            return {"refused": dict(self._refused), "nonfinite": self._nonfinite}

    def _with_finite(self, form: RowForm) -> RowForm:
        """Find the leaves that are looked at."""
        places = []
        for wanted in self._finite:
            found = [
                place
                for place, name in enumerate(form.names)
                if name == wanted or name.startswith(f"{wanted}/")
            ]
            if not found:
                raise ArgumentError(
                    f"`finite` must name leaves of trajectories, got {wanted!r}; they "
                    f"have {', '.join(form.names)}. Pass some of these, or `()`."
                )
            places += found
        self._looked_at = places
        return form

    def _finite_of(self, checked: Checked, actor: str) -> Checked:
        looked_at = [checked.leaves[place] for place in self._looked_at]
        is_finite = finite_rows(looked_at, checked.num_rows)
        if is_finite.all():
            return checked
        with self._lock:
            self._nonfinite += int((~is_finite).sum())
        if self._on_nonfinite == "keep":
            return checked
        if self._on_nonfinite == "skip":
            return Checked(checked.form, [leaf[is_finite] for leaf in checked.leaves])
        raise TrajectoryError(
            f"`trajectories` of {actor} must be finite in {', '.join(self._finite)}, "
            f"got NaN or infinity in {(~is_finite).sum()} of {checked.num_rows}. Look "
            'at its environment, or pass `on_nonfinite="skip"`.'
        )
