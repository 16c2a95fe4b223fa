"""Read the pages: their blocks of code, how each is marked, their links and anchors.

The Python blocks of a page run one after the other, in one namespace. HTML comments,
which no reader sees, direct that:

    <!-- setup                 code that runs at this place, of names that the page
    losses = ...               mentions and does not define
    -->
    <!-- fragment -->          the block below is a fragment: it cannot run
    <!-- run by tests/x.py --> the block below runs there: in processes of its own
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_PYTHON = frozenset({"python", "python3", "py", "pycon", "ipython", "ipython3"})
_PART = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<info>[^\n`]*)\n"
    r"(?P<code>.*?)^ *(?P=fence)[`~]* *$"
    r"|^ *<!-- (?P<mark>setup|fragment|run by)\b(?P<rest>.*?)-->"
    r"|^#+ (?P<heading>[^\n]+)$",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


def pages() -> list[Path]:
    """List all pages that show code, or that one of these links to."""
    return [
        *(
            README,
            *(ROOT / f"{name}.md" for name in ("AGENTS", "CONTRIBUTING", "SECURITY")),
        ),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "experiments" / "README.md",
        *sorted((ROOT / "replicator").rglob("README.md")),
    ]


def is_notebook(page: Path) -> bool:
    """Return whether MyST-NB executes a page."""
    return re.match(r"---\n(.*\n)*?file_format: mystnb\n", page.read_text()) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Code in a page.

    Attributes:
      page: File that holds it.
      line: Number of the code's first line.
      heading: Nearest heading above it.
      language: First word behind the fence, "" for none; "setup" for a setup.
      code: Its lines, without the indentation of the fence.
      mark: "" if it runs with its page, else what the comment above it holds.
    """

    page: Path
    line: int
    heading: str
    language: str
    code: str
    mark: str

    @property
    def is_python(self) -> bool:
        """Whether readers see Python."""
        return self.language.lower() in _PYTHON

    @property
    def runs(self) -> bool:
        """Whether it runs with its page."""
        return not self.mark and self.language in ("python", "setup")


def blocks_of(page: Path) -> list[Block]:
    """List the blocks of a page, setups too, in their order."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    text, heading, mark = page.read_text(), "", ""
    for part in _PART.finditer(text):
        if part["heading"]:
            heading = part["heading"]
        elif part["mark"] in ("fragment", "run by"):
            mark = f"{part['mark']}{part['rest']}".strip()
        else:
            where = part.start("rest" if part["mark"] else "code")
            indent, info = part["indent"] or "", part["info"] or ""
            yield Block(
                page=page,
                line=text.count("\n", 0, where) + 1,
                heading=heading,
                language="setup" if part["mark"] else (info.split() or [""])[0],
                code=re.sub(f"(?m)^{indent}", "", part["code"] or part["rest"] or ""),
                mark="" if part["mark"] else mark,
            )
            mark = mark if part["mark"] else ""


def links_of(page: Path) -> list[str]:
    """List the targets of the links and pictures of a page."""
    return _LINK.findall(_PART.sub(_heading_alone, page.read_text()))


def _heading_alone(part: re.Match[str]) -> str:
    return part["heading"] or ""


def anchors_of(page: Path) -> set[str]:
    """List the anchors that a repository's web page, and MyST, make of headings."""
    headings = [p["heading"] for p in _PART.finditer(page.read_text()) if p["heading"]]
    found: set[str] = set()
    for heading in headings:
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        repeated = (f"{slug}-{n}" for n in range(1, len(headings)))
        found.add(
            slug if slug not in found else next(r for r in repeated if r not in found)
        )
    return found


def broken_links(page: Path) -> list[str]:
    """List the links of a page that lead nowhere: no such file, or no such anchor."""
    broken = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):  # another site's
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            broken.append(link)
    return broken
