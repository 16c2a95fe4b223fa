"""What is looked at before trajectories get into a table, and what is counted."""

import numbers
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_text
from replicator.launchpad_bridge.trajectories.rows import (
    RowForm,
    finite_rows,
    form_of,
)
from replicator.launchpad_bridge.trajectories.table import TrajectoryError

OnNonfinite = Literal["skip", "keep", "raise"]
OTHER_ACTORS = "others"
"""Under which inserts are counted that were refused of too many actors."""
_MOST_ACTORS = 1024
_END_OF_VERSIONS = 1 << 31  # a learner's batches have them as int32


class Checked(NamedTuple):
    """Trajectories that may be copied into a table, and what was said of them.

    Attributes:
      form: Of each.
      leaves: [n, ...]; n may be 0.
      version: Of the policy that acted.
      episodes: Returns of those that ended.
    """

    form: RowForm
    leaves: Sequence[np.ndarray]
    version: int
    episodes: list[float]

    @property
    def num_rows(self) -> int:
        """Return how many they are."""
        return len(self.leaves[0])


class _Expected(NamedTuple):
    """What trajectories must be like; one object, so both are of the same insert."""

    form: RowForm
    looked_at: Sequence[int]


class RowChecks:
    """Checks trajectories; all methods may run in several threads at once."""

    def __init__(
        self, like: PyTree, finite: Sequence[str] | None, on_nonfinite: OnNonfinite
    ) -> None:
        """Say what is refused.

        Args:
          like: One trajectory, leaves without the first axis; None: the first is.
          finite: Names of leaves that are to be finite; a name stands for all below.
            None: `reward`, and `observation` where there is one.
          on_nonfinite: What happens to a trajectory in which one is not.

        Raises:
          ArgumentError: `like` has no leaf of a name.
        """
        self._finite = ("reward",) if finite is None else tuple(finite)
        self._looked_at = ("observation",) if finite is None else ()  # if it is there
        self._on_nonfinite = on_nonfinite
        # Of all below. Nothing is waited for, and no other lock taken, under it.
        self._lock = threading.Lock()
        self._refused: dict[str, int] = {}
        self._nonfinite = 0
        # Set once, by the first insert that nothing refused.
        self._expected: _Expected | None = None
        if like is not None:
            form = RowForm(like)
            places, missing = self._find_finite(form)
            if missing is not None:
                raise ArgumentError(
                    f"`finite` must name leaves of trajectories, got {missing!r}; they "
                    f"have {', '.join(form.names)}. Pass some of these, or `()`."
                )
            self._expected = _Expected(form, places)

    def check(
        self,
        trajectories: PyTree,
        *,
        actor: str,
        version: Any,
        episodes: Sequence[Any],
        snapshot: Any = None,
        fits: Callable[[int], None],
    ) -> Checked:
        """Return what of these may be inserted, as a learner can use it.

        The first ones that nothing refuses are the form of all others.

        Args:
          trajectories: Leaves [n, ...].
          actor: Whose they are.
          version: Of the policy that acted.
          episodes: Returns of those that ended.
          snapshot: Of the actor.
          fits: Given how many are left; raises where the table cannot take them.

        Raises:
          TrajectoryError: They have another form than the first, or are not finite;
            `version` is no number of updates, `episodes` are no numbers, or `snapshot`
            no bytes.
          ArgumentError: `actor` is no name.
        """
        check_text("actor", actor)
        try:
            returns = _said(actor, version, episodes, snapshot)
            form, leaves = self._rows(trajectories, actor, fits)
            return Checked(form, leaves, int(version), returns)
        except (TrajectoryError, ArgumentError):
            self._count_refused(actor)
            raise

    def statistics(self) -> dict[str, Any]:
        """Return how many inserts were refused, by actor, and rows not finite."""
        with self._lock:
            return {"refused": dict(self._refused), "nonfinite": self._nonfinite}

    def _count_refused(self, actor: str) -> None:
        with self._lock:
            # Names are the callers': what they make the table remember is bounded.
            is_known = actor in self._refused or len(self._refused) < _MOST_ACTORS
            name = actor if is_known else OTHER_ACTORS
            self._refused[name] = self._refused.get(name, 0) + 1

    def _rows(
        self, trajectories: PyTree, actor: str, fits: Callable[[int], None]
    ) -> tuple[RowForm, list[np.ndarray]]:
        while True:
            expected = self._expected or self._first(trajectories, actor)
            leaves = expected.form.check(trajectories, actor)
            looked_at = [leaves[place] for place in expected.looked_at]
            is_finite = finite_rows(looked_at, len(leaves[0]))
            if self._on_nonfinite == "skip" and not is_finite.all():
                leaves = [leaf[is_finite] for leaf in leaves]
            fits(len(leaves[0]))
            if self._on_nonfinite != "raise" or is_finite.all():
                with self._lock:
                    self._expected = self._expected or expected
                    # Two may be the first at once: the later one looks again.
                    if self._expected is not expected:
                        continue
            self._count_nonfinite(is_finite)
            if self._on_nonfinite == "raise" and not is_finite.all():
                raise _nonfinite(expected, leaves, is_finite, actor)
            return expected.form, leaves

    def _first(self, trajectories: PyTree, actor: str) -> _Expected:
        form = form_of(trajectories, actor)
        places, missing = self._find_finite(form)
        if missing is not None:
            raise TrajectoryError(
                f"`trajectories` of {actor} must have the leaves of `finite`, got none "
                f"called {missing!r}; they have {', '.join(form.names)}. Change what "
                "this actor inserts, or `finite` of the table."
            )
        return _Expected(form, places)

    def _find_finite(self, form: RowForm) -> tuple[list[int], str | None]:
        """Return the leaves that are looked at, and a name that is of none."""
        places: list[int] = []
        for wanted in (*self._finite, *self._looked_at):
            found = [
                place
                for place, name in enumerate(form.names)
                if name == wanted or name.startswith(f"{wanted}/")
            ]
            if not found and wanted in self._finite:
                return places, wanted
            places += [place for place in found if form.is_inexact(place)]
        return places, None

    def _count_nonfinite(self, is_finite: np.ndarray) -> None:
        with self._lock:
            self._nonfinite += int((~is_finite).sum())


def _nonfinite(
    expected: _Expected, leaves: Sequence[np.ndarray], is_finite: np.ndarray, actor: str
) -> TrajectoryError:
    """Return the error of rows that are not finite; names their leaves."""
    names = [
        expected.form.names[place]
        for place in expected.looked_at
        if not finite_rows([leaves[place]], len(is_finite)).all()
    ]
    return TrajectoryError(
        f"`trajectories` of {actor} must be finite, got NaN or infinity in "
        f"`{'`, `'.join(names)}` of {int((~is_finite).sum())} of {len(is_finite)}. "
        'Look at its environment, or pass `on_nonfinite="skip"`.'
    )


def _said(
    actor: str, version: Any, episodes: Sequence[Any], snapshot: Any
) -> list[float]:
    """Refuse what no learner can go on with; return the returns of episodes."""
    is_whole = isinstance(version, numbers.Integral)
    if not is_whole or not 0 <= int(version) < _END_OF_VERSIONS:
        raise TrajectoryError(
            f"`version` of {actor} must be a whole number from 0 to 2**31 - 1, got "
            f"{version!r}. Pass that of the variables it acted with."
        )
    if snapshot is not None and not isinstance(snapshot, bytes):
        raise TrajectoryError(
            f"`snapshot` of {actor} must be bytes, got {type(snapshot).__name__}. Pass "
            "None for none."
        )
    try:
        return [float(each) for each in episodes]
    except (TypeError, ValueError, OverflowError):
        raise TrajectoryError(
            f"`episodes` of {actor} must be a list of numbers, got {episodes!r}. Pass "
            "the returns of those that ended."
        ) from None
