"""The reference is what the code says: pages that are written from it are today's."""

import json
import re

import optax
import pytest

from benchmarks.docs import reference
from replicator.monitoring.events import EventLog
from tests.steps import errors, regression_batch, replicas, trainer

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_follows_from_code_is_todays(name):
    found = (reference.FOLDER / name).read_text()
    assert found == PAGES[name], "run `python -m benchmarks.docs.reference`"


def test_each_page_of_names_is_of_a_module_that_is_there():
    listed = {path.stem for path in (reference.FOLDER / "api").glob("*.md")}
    assert listed == {*reference.MODULES, "objects"}


@pytest.mark.parametrize("name", reference.MODULES)
def test_each_public_name_is_there(name):
    module = reference.module_of(name)
    assert all(hasattr(module, each) for each in reference.names_of(module))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Train for three steps with an evaluation and a checkpoint; return the folder."""
    folder = tmp_path_factory.mktemp("run")
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    rep.run(
        *(step_fn, [regression_batch()]),
        **{"init_fn": init_fn, "steps": 3, "display": False, "write_every": 1},
        **{"directory": folder, "checkpoint_dir": folder / "checkpoints"},
        eval_fn=lambda state, batch: {"error": errors(state["params"], batch)},
        **{"eval_dataset": [regression_batch()], "eval_every": 3},
    )
    return folder


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_page_of_records_has_each_field_that_a_run_writes(records):
    page = (reference.FOLDER / "records.md").read_text()
    named = set(re.findall(r"`([^`]+)`", page))
    fields = set(json.loads((records / "run.json").read_text()))
    for event in lines_of(records / "events.jsonl"):
        own = (
            {"eval/error", "examples", "error"}
            if event["kind"] == "evaluated"
            else set()
        )
        fields |= {event["kind"], *event} - own
    assert fields <= named
    [manifest] = (records / "checkpoints").glob("*/manifest.json")
    assert set(json.loads(manifest.read_text())["manifest"]) <= named
    for name in {name for row in lines_of(records / "metrics.jsonl") for name in row}:
        folder, _, rest = name.partition("/")
        is_own = folder in ("loss", "eval") or not rest
        shown = {name, f"{folder}/<phase>", f"{folder}/<i>/{rest.partition('/')[2]}"}
        assert is_own or shown & named, name


def test_the_page_of_records_has_each_kind_of_event():
    page = (reference.FOLDER / "records.md").read_text()
    kinds = re.search(r"kind: (.*?), or any", EventLog.write.__doc__, re.DOTALL)[1]
    assert {f"`{kind}`" for kind in re.findall(r"\w+", kinds)} <= set(
        re.findall("`[^`]+`", page)
    )
