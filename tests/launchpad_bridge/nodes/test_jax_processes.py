"""A group of processes as a program sees it, before it runs."""

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.graph import graph_of
from tests.launchpad_bridge import programs


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
