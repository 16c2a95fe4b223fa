"""Measure the pages and the site that is built from them, without executing notebooks.

Prints the places of what `--show=KEY` names, and one JSON object:

- `missing`: public names without an entry in the reference;
- `warnings` of Sphinx;
- `broken`: links and anchors, of pages and of the built site; names of the library and
  files that pages or docstrings name and that are not there;
- `unrun`: Python blocks that neither run nor are marked; `fragments`: share marked so;
- `unpaged`: extras, options, writers, hooks, strategies, nodes and launchers that no
  guide shows;
- `readme_lines`; `long_lines`: README's outside tables above 100 characters;
- `notebook_seconds`: the slowest notebook, when it was last executed;
- `docs_lines`: lines of all pages, of which `reference_lines` are written by code;
  `docs_lines_before`: of all pages before there was a site.
"""

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from benchmarks.docs.pages import README, blocks_of, broken_links, pages

_SHOW = flags.DEFINE_multi_string("show", [], "A key: list its places.")
_PACKAGES = ("sphinx", "myst_nb", "sphinx_book_theme")
_BEFORE = 2875  # at 49d9300
_LONG = 100


def main(_: list[str]) -> None:
    """Print the numbers as one JSON object."""
    lacking = [each for each in _PACKAGES if importlib.util.find_spec(each) is None]
    if lacking:
        sys.exit(
            f"`benchmarks.docs` must have Sphinx's packages, got no {lacking[0]}. Run "
            "`pip install 'jax-replicator[docs]'`."
        )
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        found = _found(Path(folder))
    for key in _SHOW.value:
        print("\n".join(found[key]))
    numbers = {key: len(places) for key, places in found.items()} | _numbers()
    print(json.dumps(numbers | {"seconds": round(time.monotonic() - began_s, 1)}))


def _found(folder: Path) -> dict[str, list[str]]:
    """Return the places of each number that counts what should not be."""
    from benchmarks.docs import site
    from benchmarks.docs.features import unpaged

    warnings = site.build(folder)
    links = [f"{page.name}: {link}" for page in pages() for link in broken_links(page)]
    shown = [b for page in pages() for b in blocks_of(page) if b.is_python]
    return {
        "missing": site.missing(folder),
        "warnings": warnings,
        "broken": [*links, *site.broken_in_site(folder), *site.broken_names()],
        "unrun": [f"{b.page.name}:{b.line}" for b in shown if not (b.runs or b.mark)],
        "unpaged": unpaged(),
        "long_lines": _long_lines(),
    }


def _long_lines() -> list[str]:
    return [
        f"README.md:{number}"
        for number, line in enumerate(README.read_text().splitlines(), start=1)
        if len(line) > _LONG and not line.startswith("|")
    ]


def _numbers() -> dict[str, float | None]:
    from benchmarks.docs import notebooks, reference

    shown = [b for page in pages() for b in blocks_of(page) if b.is_python]
    marked = [block for block in shown if block.mark.startswith("fragment")]
    kept = [notebooks.seconds_and_outputs(page) for page in notebooks.notebooks()]
    lines = {page: page.read_text().count("\n") for page in pages()}
    written = [lines[reference.FOLDER / name] for name in reference.pages()]
    return {
        "blocks": len(shown),
        "fragments": round(len(marked) / len(shown), 3),
        "readme_lines": lines[README],
        "notebook_seconds": max(each["seconds"] for each in kept),
        "docs_lines": sum(lines.values()),
        "reference_lines": sum(written) + lines[reference.FOLDER / "errors.md"],
        "docs_lines_before": _BEFORE,
    }


if __name__ == "__main__":
    app.run(main)
