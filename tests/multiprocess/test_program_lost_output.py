"""Programs go on where what their nodes print cannot be shown, or cannot be kept."""

import resource
import sys

import pytest

import replicator.launchpad_bridge as lp
from tests.cli.test_lost_output import SINKS, run

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import replicator.launchpad_bridge as lp

def talk(path):
    for _ in range(3000):
        print("x" * 50)
    open(path, "w").close()

program = lp.Program("talks")
program.add_node(lp.PyNode(talk, sys.argv[1]), label="talker")
lp.launch(program, lp.Processes(preload=()), dashboard=True)
"""


@pytest.mark.parametrize("sink", SINKS)
def test_a_program_goes_on_where_its_script_cannot_write(sink, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py", "done"]
    code, _ = run(words, tmp_path, sink, errors_too=True)
    assert code == 0
    assert (tmp_path / "done").exists()


def fill_the_log():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for _ in range(1000):
        print("x" * 50)
    return "done"


def test_a_node_goes_on_where_its_log_takes_no_more():
    program = lp.Program("talks")
    program.add_node(lp.PyNode(fill_the_log), label="talker")
    with lp.launch(program, lp.Processes(preload=())) as ran:
        ran.wait(60)
        assert ran.results == {"talker": "done"}
