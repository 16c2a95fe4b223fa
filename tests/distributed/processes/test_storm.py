"""A Ctrl-C while a process starts does not reach it."""

import json
import subprocess
import sys

import pytest

from tests.distributed.processes.stormed import STARTS


@pytest.mark.parametrize(("kind", "end"), [("command", 7), ("fork_server", 1)])
def test_what_starts_in_a_storm_of_ctrl_c_gets_none(kind, end, tmp_path):
    ends = subprocess.check_output(
        [sys.executable, "-m", "tests.distributed.processes.stormed", kind, tmp_path],
        start_new_session=True,
    )
    assert json.loads(ends) == [end] * STARTS
