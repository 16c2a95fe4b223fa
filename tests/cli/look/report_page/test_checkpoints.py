"""Which checkpoints a report lists: told of, there, damaged, removed since."""

import json

import numpy as np
import pytest

from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.cli.look.report_page.checkpoints import list_checkpoints
from replicator.cli.look.report_page.run_files import read_run
from tests.cli.look.report_page.runs import make_run


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "run")
    with CheckpointStore(run / "checkpoints") as store:
        for step in (100, 200):
            store.save(Snapshot(step=step, arrays={"w": np.ones(3)}, meta={}))
    return run


def states(run):
    return {line.step: line.state for line in list_checkpoints(read_run(run))}


def test_what_is_there_and_what_was_removed_is_told_apart(run):
    assert states(run) == {50: "removed", 100: "there", 200: "there"}


def test_sizes_and_times_are_told(run):
    *_, newest = list_checkpoints(read_run(run))
    assert newest.size_bytes > 0
    assert newest.time.startswith("20")


def test_a_damaged_manifest_is_told(run):
    [manifest] = run.glob("checkpoints/*100/manifest.json")
    manifest.write_text(manifest.read_text().replace("100", "101"))
    assert states(run)[100] == "damaged"


def test_a_directory_elsewhere_is_found_by_the_recorded_argument(run, tmp_path):
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    record = json.loads((run / "run.json").read_text())
    record["arguments"]["checkpoint_dir"] = str(tmp_path / "elsewhere")
    (run / "run.json").write_text(json.dumps(record))
    assert states(run)[200] == "there"
