"""An island as a program sees it, before it runs."""

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.graph import graph_of
from replicator.launchpad_bridge.launchers.threads import has_own_process
from replicator.launchpad_bridge.planning import make_plan


def test_an_island_is_a_process_also_beside_threads(tmp_path):
    program = lp.make_program(lp.IslandNode(devices=2), lp.PyNode(int))
    plan = make_plan(
        program,
        run_id="one",
        folder=tmp_path,
        logs=tmp_path,
        launch_type="threads",
        resources={},
    )
    assert list(map(has_own_process, plan.executables)) == [True, False]


def test_who_computes_on_islands_is_shown_with_an_edge_to_each():
    program = lp.Program("islands")
    with program.group("island"):
        islands = [program.add_node(lp.IslandNode()) for _ in range(2)]
    program.add_node(lp.PyNode(print, islands), label="controller")
    edges = [str(edge) for edge in graph_of(program).edges]
    assert edges == ["controller -> island/0", "controller -> island/1"]


def test_an_island_is_no_thread_of_a_colocation():
    with pytest.raises(lp.ProgramError, match="runs in a thread, got <IslandNode"):
        lp.MultiThreadingColocation([lp.IslandNode(devices=1)])


@pytest.mark.parametrize("devices", [0, 1.5])
def test_a_number_of_devices_that_is_none_is_refused(devices):
    with pytest.raises(ArgumentError, match="`devices` must be"):
        lp.IslandNode(devices=devices)
