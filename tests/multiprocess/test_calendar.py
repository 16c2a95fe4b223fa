"""Fault 16 on a whole process: its calendar jumps by hours, for C code, too."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from replicator.checkpoint import CheckpointStore
from replicator.monitoring.events import read_events
from tests.multiprocess.processes import ROOT, kill

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

JUMPS = ("+0", "+1h", "-1h")


def run(folder, *, jumps=None):
    """Run the worker; return what its calendar said, and the hash it ended with."""
    offset = folder / "offset"
    offset.write_text(JUMPS[0])
    command = [sys.executable, "-m", "tests.multiprocess.calendar_worker", str(folder)]
    worker = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | (faked(offset) if jumps else {}),
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    calendar, ended = [], None
    with worker:
        try:
            for line in worker.stdout:
                word, _, rest = line.partition(" ")
                if word == "calendar":
                    calendar.append(float(rest))
                    offset.write_text(next(jumps) if jumps else JUMPS[0])
                    worker.stdin.write("\n")
                    worker.stdin.flush()
                if word == "ended":
                    ended = rest.strip()
            assert worker.wait(timeout=60) == 0
        finally:
            kill(worker)
    return calendar, ended


def faked(offset):
    """Return the environment in which libfaketime shifts the calendar by a file."""
    asked = ["faketime", "-m", "-f", "+0", "printenv", "LD_PRELOAD"]
    library = subprocess.run(asked, capture_output=True, text=True, check=True)
    return {
        "LD_PRELOAD": library.stdout.strip(),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@pytest.fixture(scope="module")
def jumped(tmp_path_factory):
    if shutil.which("faketime") is None:
        pytest.skip("the package faketime is not installed")
    folder = tmp_path_factory.mktemp("jumped")
    return folder, *run(folder, jumps=itertools.cycle(JUMPS))


def test_the_calendar_did_jump(jumped):
    _, calendar, _ = jumped
    jumps = [after - before for before, after in itertools.pairwise(calendar)]
    assert max(jumps) > 3500
    assert min(jumps) < -3500


def test_a_run_whose_calendar_jumps_ends_with_the_same_bits(jumped, tmp_path):
    calendar, ended = run(tmp_path)
    assert len(calendar) == 40
    assert jumped[2] == ended


def test_no_hour_of_the_calendar_saves_a_run_early(jumped):
    assert CheckpointStore(jumped[0] / "saved").steps() == (40,)


def test_the_journal_of_a_run_whose_calendar_jumps_tells_of_no_trouble(jumped):
    kinds = {event["kind"] for event in read_events(jumped[0] / "run")}
    assert kinds <= {"started", "compiled", "phases", "saved", "ended", "restored"}
    assert "ended" in kinds
