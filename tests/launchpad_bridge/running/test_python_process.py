import pytest
from absl import flags

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.running.python_process import resources_of, set_flags
from tests.launchpad_bridge import programs
from tests.launchpad_bridge.programs import SOON_S, program_of


@pytest.fixture
def defined():
    flags.DEFINE_integer("lp_tried", 1, "A number.")
    flags.DEFINE_bool("lp_wanted", True, "A switch.")
    yield flags.FLAGS
    for name in ("lp_tried", "lp_wanted"):
        delattr(flags.FLAGS, name)


def test_arguments_of_a_process_are_flags(defined):
    set_flags({"lp_tried": 3, "lp_wanted": False})
    assert (defined.lp_tried, defined.lp_wanted) == (3, False)


def test_its_environment_is_that_of_its_resources():
    process = lp.PythonProcess(env={"A": 1}, args={"b": 2})
    assert resources_of("x", process) == (lp.Resources(env={"A": "1"}), {"b": 2})


def test_local_resources_of_other_programs_are_passed_over():
    program = program_of(lp.PyNode(int))
    lp.launch(program, local_resources={"nobody": lp.PythonProcess()}).wait(60)


@pytest.mark.slow
def test_flags_reach_a_process(tmp_path):
    run = lp.launch(
        program_of(lp.PyNode(programs.read_flag)),
        "local_mp",
        local_resources={"node": lp.PythonProcess(args={"lp_tried_there": 5})},
        terminal="output_to_files",
        log_dir=tmp_path,
    )
    run.wait(4 * SOON_S)
    assert run.results["node"] == 5
