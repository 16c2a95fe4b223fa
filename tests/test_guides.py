"""Blocks of the guides that need a package which is not among the requirements."""

from typing import Any

import pytest

from benchmarks.docs.pages import ROOT, blocks_of
from tests.test_readme import run_blocks

GUIDES = ROOT / "docs" / "guides"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("page", "package", "result"),
    [
        ("data.md", "datasets", "faces"),
        ("data.md", "torch", "torched"),
        ("metrics.md", "wandb", "logged"),
    ],
)
def test_what_other_packages_make_of_a_guide_trains(
    page, package, result, tmp_path, monkeypatch
):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    run_blocks([b for b in blocks_of(GUIDES / page) if b.runs], names)
    marked = [b for b in blocks_of(GUIDES / page) if b.mark.startswith("run by")]
    run_blocks([b for b in marked if package in b.code], names)
    assert names[result].step == 10
