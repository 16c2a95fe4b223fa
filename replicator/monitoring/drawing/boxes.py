"""Boxes, and the size of a text in one."""

import dataclasses
import unicodedata

_LONGEST = 34
_WIDE, _NARROW, _USUAL = 13.0, 4.4, 8.0
"""Widths of characters at 12 px, rather too large than too small: fonts differ."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangle, in pixels; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Return its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Return its lower edge."""
        return self.y + self.height

    @property
    def middle(self) -> float:
        """Return the y of its middle."""
        return self.y + self.height / 2

    def moved(self, right: float, down: float) -> "Box":
        """Return a box of the same size elsewhere.

        >>> Box(x=0, y=0, width=4, height=2).moved(1, 1).right
        5
        """
        return dataclasses.replace(self, x=self.x + right, y=self.y + down)


def shown(text: str) -> str:
    """Return a text for a box: in one line, and not too long.

    >>> shown('two  spaces')
    'two spaces'
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def width_of(text: str) -> float:
    """Return the approximate width of a text, in pixels."""
    return sum(map(_width, text))


def _width(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF" or character in "mwMW@%":
        return _WIDE
    return _NARROW if character in "iljtfrI.,:;'|/()[] " else _USUAL
