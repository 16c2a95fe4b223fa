"""Execute the notebooks among the pages, keep their outputs, and show those.

    python -m benchmarks.docs.notebooks              all
    python -m benchmarks.docs.notebooks kill_it      some

A page whose front matter holds `file_format: mystnb` is a notebook. Its outputs are
kept in `docs/notebooks/outputs/`, with a hash of its cells and of the lock: the site is
built without executing, and not at all from outputs of another day's code.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

from benchmarks.docs.pages import ROOT, is_notebook, pages

KEPT = ROOT / "docs" / "notebooks" / "outputs"
_LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
_TIMEOUT_S = 300  # of a cell
_INSTALL = """\
try:
    import replicator
except ImportError:
    %pip install --quiet jax-replicator"""


def notebooks() -> list[Path]:
    """List the pages that are notebooks."""
    return [page for page in pages() if is_notebook(page)]


def read(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook without outputs."""
    return read_myst_markdown_notebook(page.read_text(), path=str(page))


def code_hash(notebook: nbformat.NotebookNode) -> str:
    """Return a hash of the code of a notebook, and of the lock."""
    code = [cell.source for cell in _code_cells(notebook)]
    lock = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _LOCKS]
    return hashlib.sha256(json.dumps([code, lock]).encode()).hexdigest()[:16]


def execute(page: Path) -> float:
    """Execute a notebook, keep its outputs, and return the seconds that it took."""
    notebook = read(page)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        began_s = time.monotonic()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        NotebookClient(
            notebook,
            timeout=_TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        ).execute(env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})
        seconds = round(time.monotonic() - began_s, 1)
    outputs = [cell.outputs for cell in _code_cells(notebook)]
    kept = {"hash": code_hash(notebook), "seconds": seconds, "outputs": outputs}
    KEPT.mkdir(exist_ok=True)
    _kept_file(page).write_text(json.dumps(kept, indent=1) + "\n")
    return seconds


def with_outputs(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook with the outputs that are kept.

    Raises:
      ValueError: There are none, or they are of other code or another lock.
    """
    notebook, kept = read(page), seconds_and_outputs(page)
    wanted = code_hash(notebook)
    if kept["hash"] != wanted:
        raise ValueError(
            f"`{page.name}` must have outputs of today's cells and lock, {wanted}, got "
            f"those of {kept['hash'] or 'none'}. Run `make notebooks`."
        )
    cells = _code_cells(notebook)
    for number, (cell, outputs) in enumerate(zip(cells, kept["outputs"], strict=True)):
        cell.outputs = [nbformat.from_dict(output) for output in outputs]
        cell.execution_count = number + 1
    return notebook


def seconds_and_outputs(page: Path) -> dict[str, Any]:
    """Return what is kept of a notebook: `hash`, `seconds`, `outputs` of each cell."""
    path = _kept_file(page)
    if not path.exists():
        return {"hash": "", "seconds": None, "outputs": []}
    return json.loads(path.read_text())


def fill_cache(folder: Path) -> None:
    """Put all kept outputs where MyST-NB looks before it would execute a notebook."""
    cache = get_cache(folder)
    cache.clear_cache()
    for page in notebooks():
        bundle = CacheBundleIn(with_outputs(page), str(page))
        cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def write_ipynb(folder: Path) -> None:
    """Write each notebook beside its page of the site, for Jupyter or Colab."""
    for page in notebooks():
        notebook = with_outputs(page)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(_INSTALL))
        path = folder / page.relative_to(ROOT).with_suffix(".ipynb")
        path.write_text(nbformat.writes(notebook))


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _kept_file(page: Path) -> Path:
    return KEPT / f"{page.stem}.json"


def main(names: Iterable[str]) -> None:
    """Execute the notebooks of these names, all without any."""
    wanted = set(names)
    for page in notebooks():
        if not wanted or page.stem in wanted:
            print(f"{page.relative_to(ROOT)}: {execute(page)} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
