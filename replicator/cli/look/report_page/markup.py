"""Write HTML in which all text is escaped.

A value that is not `Markup` is text, and is escaped where it goes in; `Markup` comes
from `element` and `raw` alone.
"""

import html


class Markup(str):
    """HTML that is safe as it is."""

    __slots__ = ()


def raw(text: str) -> Markup:
    """Take our own HTML, style or script as it is; never text that a run wrote.

    >>> element("p", raw("&middot;"))
    '<p>&middot;</p>'
    """
    return Markup(text)


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
      tag: Its name.
      *children: `Markup` as it is, all else as text; None is left out.
      **attributes: By name; a last `_` is dropped (`class_`), other `_` become `-`.
        None and False leave an attribute out, True writes it without a value.

    >>> element("p", "1 < 2", class_="sub")
    '<p class="sub">1 &lt; 2</p>'
    """
    inner = "".join(_inner(child) for child in children if child is not None)
    given = "".join(_attribute(name, value) for name, value in attributes.items())
    return Markup(f"<{tag}{given}>{inner}</{tag}>")


def _inner(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(str(child))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
