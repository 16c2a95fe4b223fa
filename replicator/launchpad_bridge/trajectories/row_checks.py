"""Checks of trajectories before they enter a table, and counts of those refused."""

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from replicator.base.accepts import text
from replicator.base.trees import describe
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_word
from replicator.launchpad_bridge.trajectories.rows import (
    RowForm,
    RowMemory,
    finite_rows,
    form_of,
)
from replicator.launchpad_bridge.trajectories.table import TrajectoryError

OnNonfinite = Literal["skip", "keep", "raise"]
OTHER_ACTORS = "others"
"""Name under which refused inserts are counted once there are too many actors."""
_MOST_ACTORS = 1024

_Insert = TypeVar("_Insert", bound=Callable[..., Any])


class _Expected(NamedTuple):
    """Required form of trajectories; one object, so all of it is of one insert."""

    form: RowForm
    looked_at: Sequence[int]
    memory: RowMemory | None = None


class RowChecks:
    """Checks trajectories; all methods may run in several threads at once.

    Attributes:
      saved_in: Directory that the first rows came from; None for the first insert.
    """

    saved_in: Path | None = None

    def __init__(
        self,
        capacity: int,
        like: PyTree,
        finite: Sequence[str] | None,
        on_nonfinite: OnNonfinite,
    ) -> None:
        """Set the rules; no memory is taken yet.

        Args:
          capacity: Number of trajectories that the table has memory for.
          like: One trajectory, leaves without the first axis; None for the first one
            that is inserted.
          finite: Names of leaves that must be finite; a name covers all below it.
            None: `reward`; `observation` and `next_observation` where they are.
          on_nonfinite: Treatment of a trajectory with NaN or infinity in one of them.

        Raises:
          ArgumentError: `like` has no leaf of a name; or `on_nonfinite` is unknown.
        """
        check_word("on_nonfinite", on_nonfinite, ("skip", "keep", "raise"))
        self._capacity = capacity
        # True where a leaf of this name must be there.
        self._finite = {"reward": True, "observation": False, "next_observation": False}
        if finite is not None:
            self._finite = dict.fromkeys(finite, True)
        self._on_nonfinite = on_nonfinite
        # Guards all below. Under it no thread waits, or takes another lock.
        self._lock = threading.Lock()
        self._refused: dict[str, int] = {}
        self._nonfinite = 0
        # Set by the first insert that nothing refused, and that there is memory for.
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
        fits: Callable[[int], None],
        beside: Sequence[np.ndarray] = (),
    ) -> tuple[RowMemory, list[np.ndarray]]:
        """Return the trajectories that may be inserted, as a learner can use them.

        The first ones that are not refused set the form of all others. Nothing is
        copied: rows may wait for room.

        Args:
          trajectories: Leaves [n, ...].
          actor: Actor that inserts them.
          fits: Called with their number; raises where the table cannot take them.
          beside: More arrays of one element for each, as `fits` has to check.

        Returns:
          Memory of the table to write them to, and leaves [n, ...], those of `beside`
          last; n may be 0.

        Raises:
          TrajectoryError: They have another form than the first, or are not finite.
          MemoryError: They are the first, and there is no memory for as many.
        """
        while True:
            expected = self._expected or self._first(trajectories, actor)
            leaves = check_form(expected.form, trajectories, actor, self.saved_in)
            fits(len(leaves[0]))
            looked_at = [leaves[place] for place in expected.looked_at]
            is_finite = finite_rows(looked_at, len(leaves[0]))
            is_refused = self._on_nonfinite == "raise" and not is_finite.all()
            memory = None if is_refused else self._memory_of(expected)
            if memory is None and not is_refused:
                continue
            with self._lock:
                self._nonfinite += int((~is_finite).sum())
            if memory is None:
                raise _nonfinite(expected, leaves, is_finite, actor)
            leaves = [*leaves, *beside]
            if self._on_nonfinite == "skip" and not is_finite.all():
                leaves = [leaf[is_finite] for leaf in leaves]
            return memory, leaves

    def statistics(self) -> dict[str, Any]:
        """Return numbers of refused inserts, by actor, and of rows not finite."""
        with self._lock:
            return {"refused": dict(self._refused), "nonfinite": self._nonfinite}

    def count_refused(self, actor: object) -> None:
        """Count an insert that was refused."""
        with self._lock:
            # Names come from callers, so the number of names kept is bounded.
            is_known = actor in self._refused or len(self._refused) < _MOST_ACTORS
            name = actor if isinstance(actor, str) and is_known else OTHER_ACTORS
            self._refused[name] = self._refused.get(name, 0) + 1

    def _memory_of(self, expected: _Expected) -> RowMemory | None:
        """Return the table's memory; None if another insert has set the form first."""
        with self._lock:
            held = self._expected or expected
            # Two threads may be the first at once: the later one checks again.
            if held.form is not expected.form:
                return None
            # The form is set from here on, unless there is no memory for it.
            finite = () if self._on_nonfinite == "keep" else held.looked_at
            memory = held.memory or RowMemory(held.form, self._capacity, finite)
            self._expected = held._replace(memory=memory)
            return memory

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
        """Return the leaves to check, and a required name that no leaf has."""
        places: list[int] = []
        for wanted, is_required in self._finite.items():
            found = [
                place
                for place, name in enumerate(form.names)
                if name == wanted or name.startswith(f"{wanted}/")
            ]
            if not found and is_required:
                return places, wanted
            places += [place for place in found if form.is_inexact(place)]
        return places, None


def _nonfinite(
    expected: _Expected, leaves: Sequence[np.ndarray], is_finite: np.ndarray, actor: str
) -> TrajectoryError:
    """Return the error for rows that are not finite; it names their leaves."""
    names = [
        expected.form.names[place]
        for place in expected.looked_at
        if not finite_rows([leaves[place]], len(is_finite)).all()
    ]
    return TrajectoryError(
        f"`trajectories` of {actor} must be finite, got NaN or infinity in "
        f"`{'`, `'.join(names)}` of {int((~is_finite).sum())} of {len(is_finite)}. "
        'Check its environment, or pass `on_nonfinite="keep"`.'
    )


def check_form(
    form: RowForm, trajectories: PyTree, actor: str, saved_in: Path | None
) -> list[np.ndarray]:
    """Return the leaves, [n, ...], of rows that have the form of those before.

    Args:
      form: The form.
      trajectories: Leaves [n, ...].
      actor: Actor that inserts them.
      saved_in: Directory of a checkpoint that the form is from; None for none.

    Raises:
      TrajectoryError: They have another, named beside that of a checkpoint; or leaves
        of different n.
    """
    try:
        return form.check(trajectories, actor)
    except TrajectoryError as error:
        due = _text(form)
        # Of one form there is another fault, as leaves of different n.
        if saved_in is None or (found := _text(form_of(trajectories, actor))) == due:
            raise
        raise TrajectoryError(
            f"`trajectories` of {actor} must have the form of those in "
            f"`checkpoint_dir`, {due} in {saved_in}, got {found}. Choose another "
            "directory, or insert rows as before."
        ) from error


def counts_refused(insert: _Insert) -> _Insert:
    """Make an `insert` count its refusals in the `_checks` of its table."""

    @functools.wraps(insert)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return insert(self, *args, **kwargs)
        except (TrajectoryError, ArgumentError):
            actor = kwargs.get("actor")
            self._checks.count_refused(actor if text().is_right(actor) else None)
            raise

    return counted  # type: ignore[return-value]


def _text(form: RowForm) -> str:
    """Return a form as text, like {'reward': 'float32[20]'}."""
    rows = form.to_tree(form.make_rows(1))
    return str(jax.tree.map(lambda leaf: describe(leaf[0]), rows))
