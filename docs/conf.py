"""Configuration of the site: `sphinx-build -c docs . build/site`.

The source folder is the whole repository: a link between two of its files is the same
in the repository and on the site, and pages of packages are where their code is.
"""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from benchmarks.docs import notebooks
from benchmarks.docs.docstrings import to_rst
from replicator.base.version import __version__

project = "replicator"
author = "the authors of replicator"
release = version = __version__
project_copyright = "the authors of replicator"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
]

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "experiments/README.md",
    "replicator/**/README.md",
    *(f"{name}.md" for name in ("AGENTS", "CHANGELOG", "CONTRIBUTING")),
    *("README.md", "SECURITY.md"),
]
# Folders that are not entered; environments and results of runs are large.
exclude_patterns = [".*", "benchmarks", "build", "dist", "runs", "tests"]

myst_heading_anchors = 4  # as the repository's web page makes them
# Outputs come from a cache that `fill_cache` fills: nothing is executed here.
nb_execution_mode = "cache"
nb_execution_cache_path = str(notebooks.ROOT / "build" / "notebooks")
nb_execution_raise_on_error = True

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
# In docstrings as in Markdown: code, and a link where it is a name of the library.
default_role = "py:obj"

html_theme = "sphinx_book_theme"
html_title = "replicator"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]
html_theme_options = {
    "navbar_persistent": [],  # the sidebar has a search of its own
    "show_toc_level": 2,
    "use_download_button": False,
}


def setup(app: Sphinx) -> None:
    """Bring docstrings and kept outputs of notebooks in, and write notebooks out."""
    app.connect("autodoc-process-docstring", _to_rst, priority=400)  # before napoleon
    app.connect("builder-inited", _fill_cache)
    app.connect("build-finished", _write_ipynb)
    app.connect("html-page-context", _offer_ipynb, priority=501)  # after the theme


def _to_rst(
    _: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    lines[:] = to_rst(lines)


def _fill_cache(_: Sphinx) -> None:
    notebooks.fill_cache(Path(nb_execution_cache_path))


def _offer_ipynb(
    _: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Add a button to the page of a notebook."""
    if (notebooks.ROOT / f"{page}.md") in notebooks.notebooks():
        context["header_buttons"].append(
            {
                "type": "link",
                "url": f"{page.rpartition('/')[2]}.ipynb",
                "text": "Notebook",
                "tooltip": "This page as a Jupyter notebook",
                "label": "notebook",
            }
        )


def _write_ipynb(app: Sphinx, failure: Exception | None) -> None:
    if failure is None:
        notebooks.write_ipynb(Path(app.outdir))
