"""A group of processes as a program sees it, before it runs."""

import os

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.graph import graph_of
from replicator.launchpad_bridge.planning import make_plan
from tests.launchpad_bridge import programs
from tests.launchpad_bridge.programs import SOON_S, program_of


def test_its_members_are_the_workers_of_its_group_with_the_handles_of_all():
    program = lp.Program("grouped")
    server = program.add_node(lp.CourierNode(programs.Counter), label="server")
    program.add_node(lp.JaxProcesses(print, server, processes=2), label="learner")
    shown = graph_of(program)
    names = [vertex.name for vertex in shown.vertices]
    assert names == ["server", "learner/0", "learner/1"]
    edges = [str(edge) for edge in shown.edges]
    assert edges == ["learner/0 -> server", "learner/1 -> server"]


@pytest.mark.parametrize("processes", [0, 1.5])
def test_a_number_of_processes_that_is_none_is_refused(processes):
    with pytest.raises(ArgumentError, match="`processes` must be"):
        lp.JaxProcesses(print, processes=processes)


@pytest.mark.parametrize(
    "colocation", [lp.MultiThreadingColocation, lp.MultiProcessingColocation]
)
def test_a_group_is_no_part_of_a_colocation(colocation):
    with pytest.raises(lp.ProgramError, match="`node` must be one worker, got <JaxP"):
        colocation([lp.JaxProcesses(print, processes=2)])


def test_a_group_of_one_has_its_name_and_its_rules(tmp_path):
    program = program_of(lp.JaxProcesses(int, processes=1))
    (executable,) = make_plan(
        program,
        run_id="one",
        folder=tmp_path,
        logs=tmp_path,
        launch_type="processes",
        resources={},
    ).executables
    assert (executable.name, executable.is_member) == ("node/0", True)


@pytest.mark.slow
def test_a_group_of_one_is_joined_and_gives_the_result(tmp_path):
    program = program_of(
        lp.JaxProcesses(os.getenv, "REPLICATOR_NUM_PROCESSES", processes=1)
    )
    run = lp.launch(program, "processes", log_dir=tmp_path)
    run.wait(4 * SOON_S)
    assert run.results == {"node/0": "1", "node": "1"}
