import json
import os

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import LaunchError
from replicator.launchpad_bridge.planning import DESCRIPTION
from replicator.launchpad_bridge.run_folder import RunFolder
from replicator.launchpad_bridge.view.watching.found_runs import (
    FoundRun,
    matching,
    run_in,
    running_programs,
)
from tests.launchpad_bridge.programs import Counter


@pytest.fixture
def running():
    program = lp.make_program(lp.CourierNode(Counter), name="found")
    with lp.launch(program, launch_type="threads") as run:
        yield run


def test_a_program_that_runs_is_found(running):
    (found,) = [r for r in running_programs() if r.run_id == running.run_id]
    assert (found.program, found.pid, found.workers) == ("found", os.getpid(), 1)
    assert found.folder == running.plan.folder
    assert run_in(found.folder) == found


def test_one_that_has_ended_is_not(running):
    running.stop_and_wait()
    assert running.run_id not in {r.run_id for r in running_programs()}
    with pytest.raises(LaunchError, match="must belong to a running program"):
        run_in(running.plan.folder)


def make(folder, text=None, *, lock=True):
    folder.mkdir()
    if lock:
        (folder / "launcher.lock").touch()
    known = {"program": "p", "run_id": "r", "pid": 1, "workers": []}
    (folder / DESCRIPTION).write_text(json.dumps(known) if text is None else text)
    return folder


@pytest.mark.parametrize("damage", ["abandoned", "unlocked", "garbled", "elsewhere"])
def test_what_is_no_running_program_is_neither_found_nor_shown(
    tmp_path, running, damage
):
    folder = tmp_path / "lp-x"
    if damage == "abandoned":
        make(folder)
    elif damage == "unlocked":
        make(folder, lock=False)
    elif damage == "garbled":
        (running.plan.folder / DESCRIPTION).write_text("{")
        folder = running.plan.folder
    else:
        folder.symlink_to(running.plan.folder)
    assert folder not in {run.folder for run in running_programs([folder.parent])}
    with pytest.raises(LaunchError, match="`folder` must belong to a running"):
        run_in(folder)


DAMAGED = [
    "[]",
    "3",
    "[" * 100_000,
    '{"program": "p"}',
    '{"program": 5, "run_id": "r"}',
]
DAMAGED += ['{"program": "p", "run_id": "r", "pid": 1, "workers": 3}', "\0", "\udcff"]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_description_hides_no_other_program(running, text):
    folder = RunFolder()
    (folder.path / DESCRIPTION).write_bytes(text.encode(errors="surrogateescape"))
    try:
        there = {run.run_id for run in running_programs([folder.path.parent])}
        assert running.run_id in there
        with pytest.raises(LaunchError, match="`folder` must belong to a running"):
            run_in(folder.path)
    finally:
        folder.close()


def found(program, run_id, pid):
    return FoundRun(
        folder=None, program=program, run_id=run_id, pid=pid, workers=1, started_s=0.0
    )


@pytest.mark.parametrize(
    ("words", "meant"), [("a", "1 2"), ("abc", "1"), ("17", "2"), ("x", ""), ("77", "")]
)
def test_a_name_a_run_or_a_process_is_meant(words, meant):
    runs = {"1": found("a", "abcd", 16), "2": found("a", "ef", 17)}
    assert matching(runs.values(), words) == [runs[n] for n in meant.split()]
