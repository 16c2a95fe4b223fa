"""Name the features of the library, as its code has them, that no guide shows."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import replicator.launchpad_bridge as lp
from benchmarks.docs.pages import README, ROOT, pages
from benchmarks.docs.reference import option_groups
from replicator import hooks, strategies, writers
from replicator.distributed.launchers.detectors import DETECTORS

_NOT_GUIDES = ("reference", "benchmarks.md", "design.md", "why")
_FOR_DEVELOPERS = frozenset({"all", "dev", "docs", "experiments", "test"})


def guides() -> list[Path]:
    """List the pages for users: guides, start, recipes, notebooks, READMEs."""
    docs = ROOT / "docs"
    return [
        page
        for page in pages()
        if (page.name == "README.md" and page != README)
        or (
            page.is_relative_to(docs)
            and page.relative_to(docs).parts[0] not in _NOT_GUIDES
        )
    ]


def features() -> Iterator[tuple[str, str]]:
    """Yield each feature, and the pattern by which a page shows it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in sorted(set(project["optional-dependencies"]) - _FOR_DEVELOPERS):
        yield f"extra {extra}", rf"jax-replicator\[[\w,]*\b{extra}\b"
    for group, options in option_groups().items():
        yield (
            f"options of {group}",
            "|".join(rf"\b{name}=|`{name}`" for name in options),
        )
    for module in (writers, hooks, strategies):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", rf"\b{name}\b"
    for name in lp.__all__:
        if inspect.isclass(node := getattr(lp, name)) and issubclass(node, lp.Node):
            yield f"lp.{name}", rf"\b{name}\b"
    for kind in DETECTORS:
        yield f"launcher {kind}", rf"`{kind}`"


def unpaged() -> list[str]:
    """List the features that no guide shows."""
    text = "\n".join(page.read_text() for page in guides())
    return [name for name, pattern in features() if not re.search(pattern, text)]
