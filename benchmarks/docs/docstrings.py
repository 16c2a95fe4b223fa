"""Turn docstrings, which are written as Markdown is, into what Sphinx reads.

Google's sections are left to `sphinx.ext.napoleon`. Code in backticks stays code; where
it is a name, Sphinx links it. Code that is indented becomes a literal block.
"""

import re

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def to_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText.

    >>> to_rst(["Call it:", "", "    run(`a`)", "", "See `b` and `c + d`."])
    ['Call it:', '', '::', '', '    run(`a`)', '', 'See `b` and ``c + d``.']
    """
    found: list[str] = []
    text: list[str] = []
    is_literal, is_session, last = False, False, ""
    for line in lines:
        is_indented, is_after_blank = (
            line.startswith(" "),
            not (text or found or [""])[-1],
        )
        if is_indented and is_after_blank and _begins_literal(last, line):
            found += [*_inline(text), "::", ""]
            text, is_literal = [], True
        if line and not is_indented:
            is_literal = False
        # An interactive session lasts until a line is empty.
        is_session = bool(line) and (is_session or line.lstrip().startswith(">>>"))
        if is_literal or is_session:
            found += [*_inline(text), line]
            text = []
        else:
            text.append(line)
        if line and not is_literal:
            last = line
    return [*found, *_inline(text)]


def _begins_literal(last: str, line: str) -> bool:
    """Return whether an indented line after a blank one is code.

    Args:
      last: The ordinary line before.
      line: The indented line.
    """
    is_in_section = bool(_SECTION.match(last)) or last.startswith((" ", "- ", ">>>"))
    return not is_in_section and not line.lstrip().startswith(">>>")


def _inline(text: list[str]) -> list[str]:
    def marked(code: re.Match[str]) -> str:
        return code[0] if _NAME.fullmatch(code[1]) else f"``{code[1]}``"

    return _CODE.sub(marked, "\n".join(text)).split("\n") if text else []
