"""Build the site and read what was built: its names, its links, its anchors."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.docs.pages import ROOT, blocks_of, pages
from benchmarks.docs.reference import MODULES, homes, module_of, names_of
from benchmarks.wording import docstrings

_PATH = re.compile(
    r"`((?:docs|tests|benchmarks|experiments|models|replicator)/[\w./-]+)`"
)
_NAME = re.compile(r"`(replicator(?:\.\w+)+)(?:\([^`]*\))?`")


def build(folder: Path) -> list[str]:
    """Build the site from kept outputs into `folder`; return Sphinx's warnings.

    Raises:
      RuntimeError: Sphinx failed, for example as outputs are of another day's code.
    """
    command = [sys.executable, "-m", "sphinx", "-q", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`make docs` must succeed, got:\n{done.stderr}")
    lines = done.stderr.splitlines()
    return [line for line in lines if re.search(r"\b(WARNING|ERROR|CRITICAL)\b", line)]


def documented(folder: Path) -> set[str]:
    """Return the names of Python that the built site has an entry for."""
    content = (folder / "objects.inv").read_bytes()
    # Four lines of text, then the entries: `name domain:role priority address title`.
    entries = zlib.decompress(content.split(b"\n", 4)[4]).decode().splitlines()
    return {
        name for name, kind in (e.split()[:2] for e in entries) if kind[:3] == "py:"
    }


def missing(folder: Path) -> list[str]:
    """List the public names without an entry, those that pages import among them."""
    wanted = {
        homes().get(getattr(module_of(module), name), f"{module}.{name}")
        for module in MODULES
        for name in names_of(module_of(module))
        if name != "__version__"
    }
    shown = [b for page in pages() for b in blocks_of(page) if b.is_python]
    for block in shown:
        for match in re.finditer(
            r"(?m)^ *from (replicator[\w.]*) import (.+)", block.code
        ):
            names = re.findall(r"(\w+)(?: as \w+)?", match[2].partition("#")[0])
            wanted |= {f"{match[1]}.{name}" for name in names if name != "as"}
    return sorted(wanted - documented(folder))


class _Page(HTMLParser):
    """Collects the anchors and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {each for each in (given.get("id"), given.get("name")) if each}
        if link := given.get("href") or (given.get("src") if tag == "img" else None):
            self.links.add(link)


def broken_in_site(folder: Path) -> list[str]:
    """List the links of the built site that lead to no file, or to no anchor."""
    files = (path.resolve() for path in sorted(folder.rglob("*.html")))
    built = {path: _Page(path) for path in files if "_static" not in path.parts}
    broken = []
    for path, page in built.items():
        for link in sorted(page.links):
            name, _, anchor = link.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if re.match(r"[a-z]+:", link):
                continue
            lost = anchor and target in built and anchor not in built[target].anchors
            if lost or not target.exists():
                broken.append(f"{path.relative_to(folder.resolve())}: {link}")
    return broken


def broken_names() -> list[str]:
    """List names of the library and files that pages and docstrings name in vain."""
    texts = {page: page.read_text() for page in pages()}
    for path in sorted((ROOT / "replicator").rglob("*.py")):
        found = docstrings(ast.parse(path.read_text()))
        texts[path] = "\n".join(str(each.value) for each in found)
    broken = []
    for path, text in texts.items():
        lost = [each for each in _PATH.findall(text) if not _is_file(each)]
        names = [each for each in _NAME.findall(text) if each.split(".")[-1] != "py"]
        lost += [each for each in names if not _is_name(each)]
        broken += [f"{path.relative_to(ROOT)}: `{each}`" for each in lost]
    return broken


def _is_file(path: str) -> bool:
    return (ROOT / path).exists() or any(ROOT.glob(f"{path}*"))


@functools.cache
def _is_name(dotted: str) -> bool:
    found = importlib.import_module("replicator")
    for number, name in enumerate(dotted.split(".")[1:], start=2):
        if not hasattr(found, name):
            try:
                importlib.import_module(".".join(dotted.split(".")[:number]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, name)
    return True
