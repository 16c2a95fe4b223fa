"""What a plan says of its workers, before any runs."""

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.planning import make_plan
from tests.launchpad_bridge.programs import program_of

FLAGS = {"rate": 0.5}
PROCESSES = {
    "processes": lambda: lp.JaxProcesses(int, processes=2),
    "colocation": lambda: lp.MultiProcessingColocation([lp.PyNode(int)]),
}


def plan_of(node, tmp_path, launch_type=lp.LaunchType.LOCAL_MULTI_THREADING):
    return make_plan(
        program_of(node),
        run_id="planned",
        folder=tmp_path,
        logs=tmp_path,
        launch_type=launch_type,
        resources={"node": lp.PythonProcess(args=FLAGS)},
    )


@pytest.mark.parametrize("kind", PROCESSES)
def test_beside_threads_processes_have_flags_of_their_own(kind, tmp_path):
    for executable in plan_of(PROCESSES[kind](), tmp_path).executables:
        assert executable.run.flags == FLAGS


def test_threads_have_no_flags_of_their_own(tmp_path):
    (executable,) = plan_of(lp.PyNode(int), tmp_path).executables
    assert executable.run.flags == {}
