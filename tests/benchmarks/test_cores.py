"""Processes that are timed against each other run where they are told to."""

import os
import subprocess
import sys

import pytest

from benchmarks.cores import on_core, two_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no affinity here"
)


def test_two_cores_are_two_that_this_process_may_use():
    cores = two_cores()
    if cores is not None:
        assert len(set(cores)) == 2
        assert set(cores) <= os.sched_getaffinity(0)


def test_one_core_is_no_pair():
    with on_core(min(os.sched_getaffinity(0))):
        assert two_cores() is None


def test_what_is_started_on_a_core_stays_there_and_who_started_it_does_not():
    before = os.sched_getaffinity(0)
    core = max(before)
    with on_core(core):
        told = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert told.stdout.split() == [str(core)]
    assert os.sched_getaffinity(0) == before


def test_no_core_changes_nothing():
    before = os.sched_getaffinity(0)
    with on_core(None):
        assert os.sched_getaffinity(0) == before
