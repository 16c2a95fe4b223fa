"""Choose few rows of a table that hold each pair of its values."""

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Pair = frozenset[tuple[str, Any]]


def cover(
    ideas: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    *,
    held: Iterable[Row] = (),
) -> list[Row]:
    """Return rows that hold each pair of values that a row can hold.

    Greedy (Cohen et al. 1997, "The AETG system"): a row begins with a pair that is
    missing, and takes for each other idea the value that adds most pairs; of equals the
    one that was used least.

    Args:
      ideas: By name: its values.
      allowed: Whether a row, or the part of one, is possible.
      held: Rows that are there already, of these ideas.

    Returns:
      Rows to add.
    """
    missing = dict.fromkeys(
        frozenset({(a, one), (b, other)})
        for a, b in itertools.combinations(ideas, 2)
        for one, other in itertools.product(ideas[a], ideas[b])
        if allowed({a: one, b: other})
    )
    for row in held:
        _strike(missing, row)
    rows: list[Row] = []
    uses = collections.Counter[tuple[str, Any]]()

    def merit(row: Row, value: tuple[str, Any]) -> tuple[int, int]:
        added = sum(frozenset({value, each}) in missing for each in row.items())
        return added, -uses[value]

    while missing:
        begun = next(iter(missing))
        row = _completed(dict(sorted(begun)), ideas, allowed, merit)
        if row is None:  # nothing that is possible holds it
            del missing[begun]
            continue
        _strike(missing, row)
        uses.update(row.items())
        rows.append(row)
    return rows


def pairs(row: Row) -> Iterable[Pair]:
    """List the pairs of values that a row holds."""
    return map(frozenset, itertools.combinations(row.items(), 2))


def _strike(missing: dict[Pair, None], row: Row) -> None:
    for pair in pairs(row):
        missing.pop(pair, None)


def _completed(
    row: Row,
    ideas: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    merit: Callable[[Row, tuple[str, Any]], tuple[int, int]],
) -> Row | None:
    """Return a whole row, or None if there is none."""
    left = [idea for idea in ideas if idea not in row]
    if not left:
        return row
    values = ((left[0], value) for value in ideas[left[0]])
    for idea, value in sorted(values, key=lambda each: merit(row, each), reverse=True):
        longer = {**row, idea: value}
        if allowed(longer):
            whole = _completed(longer, ideas, allowed, merit)
            if whole is not None:
                return whole
    return None
