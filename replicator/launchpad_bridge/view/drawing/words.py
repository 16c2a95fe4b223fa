"""Where the words beside arrows stand: where no line runs through them.

The words of one arrow after the other get the best place that is left, of some along
their own line, above and below it, or to its right. Among very many lines, which no
words could be read between, they stay on their own.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from replicator.launchpad_bridge.view.drawing.boxes import Box
from replicator.launchpad_bridge.view.drawing.curves import Curve

_WIDTH, _HEIGHT = 100.0, 13.0
_DESCENT = 3.0
"""How far letters reach below their baseline."""
_AWAY = 3.0
_MOST_LINES = 64
_ALONG = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)


def with_words(
    curves: Sequence[Curve], boxes: Iterable[Box]
) -> tuple[list[Curve], list[Box]]:
    """Return the lines with the places of their words, and the room that these take.

    Args:
      curves: All of a picture.
      boxes: What words are not written over.
    """
    if len(curves) > _MOST_LINES:
        return [*curves], []
    lines = [point for curve in curves for point in curve.points]
    others, room, found = [*boxes], [], []
    for curve in curves:
        taken = [*others, *room]
        best = min(_places(curve), key=lambda place: _crossed(place, lines, taken))
        room.append(best)
        words = best.x + _WIDTH / 2, best.bottom - _DESCENT
        found.append(dataclasses.replace(curve, words=words))
    return found, room


def _places(curve: Curve) -> Iterator[Box]:
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


def _crossed(
    place: Box, lines: Iterable[tuple[float, float]], taken: Iterable[Box]
) -> tuple[int, int]:
    """Return how much is in the way: boxes and other words count before lines."""
    covered = sum(
        place.x < box.right
        and box.x < place.right
        and place.y < box.bottom
        and box.y < place.bottom
        for box in taken
    )
    is_outside = place.x < 0 or place.y < 0
    through = sum(
        place.x < x < place.right and place.y < y < place.bottom for x, y in lines
    )
    return covered + is_outside, through
