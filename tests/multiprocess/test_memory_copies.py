"""A group that lost a process goes on from the copies in its launcher's memory."""

import json

import pytest

from replicator.monitoring.events import read_events
from tests.distributed.processes.launched import Launched, script
from tests.multiprocess.test_launch_training import TRAIN

pytestmark = pytest.mark.slow

EVERY = 5
STEPS = 30
WHOLE = TRAIN.replace("steps=60", f"steps={STEPS}")
COPIED = WHOLE.replace(
    "checkpoint_every=5,", f"checkpoint_every=1000,\n    memory_copy_every={EVERY},"
)


def launched(folder, monkeypatch, train, **environ):
    """Train in two processes; return their last lines, the journal, the metrics."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ("--processes", 2, "--devices-per-process", 2, script(folder, train))
    with Launched(*words, environ=environ) as group:
        assert group.wait() == 0, group.text
    ended = {line[4:] for _, line in group.wait_for(f"] ended {STEPS} ", count=2)}
    metrics = (folder / "records" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in metrics]
    return ended, read_events(folder / "records"), steps


def test_a_run_whose_process_was_killed_ends_with_the_same_bits(
    tmp_path, monkeypatch, pytestconfig
):
    environ = {"PYTHONPATH": str(pytestconfig.rootpath)}
    whole, _, _ = launched(tmp_path / "whole", monkeypatch, WHOLE, **environ)
    ended, events, steps = launched(
        tmp_path / "broken",
        monkeypatch,
        COPIED,
        REPLICATOR_FAULTS="kill rank 1 at step 23",
        REPLICATOR_FAULTS_JOURNAL="faults.jsonl",
        **environ,
    )
    assert ended == whole
    assert len(whole) == 1
    [resumed] = (event for event in events if event["kind"] == "resumed")
    assert resumed["source"] == "memory"
    # The copy of the last due step may still have been on its way.
    assert resumed["step"] in (15, 20)
    assert sorted(set(steps)) == sorted(steps)
