"""Text from elsewhere made safe for a terminal: readable, without effects there."""

import re

# All but tab and line feed: escape sequences can hide lines, rename the window, and
# with some terminals type.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    r"""Escape control characters, except tabs and line ends.

    >>> plain("\x1b[2J")
    '\\x1b[2J'
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
