"""Examples run in the docstrings of all modules, also of those that users never import.

Those of exported names run in `test_docstrings.py`.
"""

import doctest
import importlib
import io
from pathlib import Path

import jax
import pytest

import replicator
from tests.test_docstrings import EXAMPLES as EXPORTED
from tests.test_docstrings import names  # noqa: F401 (a fixture)

ROOT = Path(replicator.__file__).parent


def examples():
    """Find the examples in all files that have any, but for those run elsewhere."""
    elsewhere = {test.docstring for test, _ in EXPORTED.values()}
    for path in sorted(ROOT.rglob("*.py")):
        if ">>>" not in path.read_text():
            continue
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder().find(module, name):
            if test.examples and test.docstring not in elsewhere:
                yield test


TESTS = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", TESTS)
def test_the_example_of(name, names, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    test = TESTS[name]
    test.globs = {**vars(replicator), **names, **test.globs, "__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed = runner.run(test, out=output.write).failed
    assert not failed, output.getvalue()
