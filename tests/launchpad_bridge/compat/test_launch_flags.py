"""Launchpad's flags, which only the drop-in has, and a script's own in its workers."""

import pytest

from tests.launchpad_bridge.compat.scripts import run

FLAGGED = """
from absl import app, flags
import launchpad as lp
import neighbour

FLAGS = flags.FLAGS
_COUNT = flags.DEFINE_integer("count", 1, "")
flags.DEFINE_list("names", ["x"], "")
flags.DEFINE_string("unset", None, "")
flags.DEFINE_boolean("shown", True, "")

def tell():
    kind = lp.context.get_context().launch_type.value
    print("told", kind, _COUNT.value, FLAGS.names, FLAGS.unset, FLAGS.shown)
    print("neighbour", neighbour.FLAGS.near, lp.LAUNCH_TYPE.value)

def main(argv):
    program = lp.Program("flagged")
    program.add_node(lp.PyNode(tell), label="node")
    lp.launch(program).wait()

if __name__ == "__main__":
    app.run(main)
"""
NEIGHBOUR = """
from absl import flags
FLAGS = flags.FLAGS
flags.DEFINE_float("near", 0.5, "")
"""
TYPES = {
    "local_mt": "local_mt",
    "threads": "local_mt",
    "test_mt": "test_mt",
    "test": "test_mt",
    "local_mp": "local_mp",
    "processes": "local_mp",
    "test_mp": "test_mp",
    "ray": "ray",
}
QUICK = {"local_mt"}  # one process, not several one after the other


@pytest.fixture
def flagged(tmp_path):
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "flagged.py").write_text(FLAGGED)

    def flagged(*flags):
        return run([tmp_path / "flagged.py", *flags], folder=tmp_path)

    return flagged


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow])
        for kind in TYPES
    ],
)
def test_each_launch_type_launches_and_workers_have_the_flags(flagged, kind):
    if kind == "ray":
        pytest.importorskip("ray")
    given = ["--count=3", "--names=a,b", "--noshown", "--near=2.5"]
    status, out = flagged(f"--lp_launch_type={kind}", *given)
    assert status == 0, out
    assert f"told {TYPES[kind]} 3 ['a', 'b'] None False" in out
    assert f"neighbour 2.5 {kind}" in out


@pytest.mark.slow
def test_flags_that_were_not_given_have_their_defaults_in_workers(flagged):
    status, out = flagged("--lp_launch_type=local_mp")
    assert status == 0, out
    assert "told local_mp 1 ['x'] None True" in out
    assert "neighbour 0.5 local_mp" in out


@pytest.mark.parametrize(
    "kind", ["vertex_ai", pytest.param("local_docker", marks=pytest.mark.slow)]
)
def test_launch_types_of_googles_services_are_refused_with_a_remedy(flagged, kind):
    status, out = flagged(f"--lp_launch_type={kind}")
    assert status == 1
    assert f"got '{kind}'. Use 'ray' for a cluster, 'processes' for a host." in out


UNPARSED = """
import launchpad as lp

def node():
    print("type", lp.LAUNCH_TYPE.value)

program = lp.Program("unparsed")
program.add_node(lp.PyNode(node), label="node")
lp.launch(program).wait(["node"])
print("waited for a group")
"""


def test_a_script_that_parses_no_flags_has_launchpads_all_the_same(tmp_path):
    script = tmp_path / "unparsed.py"
    script.write_text(UNPARSED)
    words = [script, "--lp_launch_type=test_mt", "--of_nobody"]
    status, out = run(words, folder=tmp_path)
    assert status == 0, out
    assert "type test_mt" in out
    assert "waited for a group" in out


PATIENT = """
import threading, time
import launchpad as lp

def deaf():
    threading.Event().wait(100)

program = lp.Program("patient")
program.add_node(lp.PyNode(deaf), label="deaf")
program.add_node(lp.PyNode(lp.stop), label="stopping")
started_s = time.monotonic()
lp.launch(program).wait()
print("after", time.monotonic() - started_s < 50)
"""


@pytest.mark.slow
def test_the_notice_of_termination_is_how_long_nodes_may_take_to_stop(tmp_path):
    script = tmp_path / "patient.py"
    script.write_text(PATIENT)
    status, out = run([script, "--lp_termination_notice_secs=0"], folder=tmp_path)
    assert status == 0, out
    assert "killing `deaf`" in out
    assert "after True" in out
