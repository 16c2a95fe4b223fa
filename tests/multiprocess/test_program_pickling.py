"""What a script defines can be pickled in its nodes, on processes as on threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.processes import ROOT

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("pickling_script.py")
TIMEOUT_S = 300.0


def run(*words, folder):
    done = subprocess.run(
        [sys.executable, SCRIPT, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# To fork a process of several threads is nobody's promise.
METHODS = [("threads", "spawn"), ("threads", "forkserver")]
METHODS += [("processes", method) for method in ("fork", "spawn", "forkserver")]


@pytest.mark.parametrize(("launcher", "method"), METHODS)
def test_a_node_pickles_what_its_script_defines(launcher, method, tmp_path):
    assert "found (True, 4)" in run(launcher, method, "", folder=tmp_path)


@pytest.mark.parametrize("child", ["fork", "spawn", "forkserver"])
def test_a_program_may_be_launched_by_a_child_of_any_kind(child, tmp_path):
    assert "found (True, 4)" in run("processes", "spawn", child, folder=tmp_path)
