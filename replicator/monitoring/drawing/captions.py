"""Place the captions of arrows where no line runs through them.

One caption after the other gets the best free place out of some along its own line,
above and below it, or to its right.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from replicator.monitoring.drawing.boxes import Box
from replicator.monitoring.drawing.curves import ArrowLine
from replicator.monitoring.drawing.layers import Point

_WIDTH, _HEIGHT = 100.0, 13.0
_DESCENT = 3.0
"""Depth of letters below their baseline."""
_AWAY = 3.0
_ALONG = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)


def with_captions(
    curves: Sequence[ArrowLine], boxes: Iterable[Box]
) -> tuple[list[ArrowLine], list[Box]]:
    """Return the lines with the places of their captions, and the boxes of these.

    Args:
      curves: All lines of a picture.
      boxes: Boxes that captions must not cover.
    """
    picture = _Picture((point for curve in curves for point in curve.points), boxes)
    room, found = [], []
    for curve in curves:
        best = min(_places(curve), key=picture.crossed)
        picture.add(best)
        room.append(best)
        caption = best.x + _WIDTH / 2, best.bottom - _DESCENT
        found.append(dataclasses.replace(curve, caption=caption))
    return found, room


def _places(curve: ArrowLine) -> Iterator[Box]:
    on_it = [curve.points[int(share * (len(curve.points) - 1))] for share in _ALONG]
    for x, _ in on_it:
        left = x - _WIDTH / 2
        heights = [y for x, y in curve.points if left <= x <= left + _WIDTH]
        for y in (min(heights) - _AWAY - _HEIGHT, max(heights) + _AWAY):
            yield Box(x=left, y=y, width=_WIDTH, height=_HEIGHT)
    # Of a line beside a column: to its right.
    for _, y in on_it:
        x = curve.right + _AWAY
        yield Box(x=x, y=y - _HEIGHT / 2, width=_WIDTH, height=_HEIGHT)


class _Picture:
    """Contents of a picture, by cells: of a thousand arrows few are near a caption."""

    def __init__(self, lines: Iterable[Point], boxes: Iterable[Box]) -> None:
        self._lines = collections.defaultdict(list)
        self._taken = collections.defaultdict(list)
        for x, y in lines:
            self._lines[x // _WIDTH, y // _HEIGHT].append((x, y))
        for box in boxes:
            self.add(box)

    def add(self, box: Box) -> None:
        """Mark a box as taken."""
        for cell in _cells(box):
            self._taken[cell].append(box)

    def crossed(self, place: Box) -> tuple[int, int]:
        """Return what a place covers: boxes and other captions count before lines."""
        cells = [*_cells(place)]
        covered = {
            box
            for cell in cells
            for box in self._taken[cell]
            if place.x < box.right
            and box.x < place.right
            and place.y < box.bottom
            and box.y < place.bottom
        }
        is_outside = place.x < 0 or place.y < 0
        through = sum(
            place.x < x < place.right and place.y < y < place.bottom
            for cell in cells
            for x, y in self._lines[cell]
        )
        return len(covered) + is_outside, through


def _cells(box: Box) -> Iterator[tuple[float, float]]:
    columns = range(int(box.x // _WIDTH), int(box.right // _WIDTH) + 1)
    rows = range(int(box.y // _HEIGHT), int(box.bottom // _HEIGHT) + 1)
    return itertools.product(columns, rows)
