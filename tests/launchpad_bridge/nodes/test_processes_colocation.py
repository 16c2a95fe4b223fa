import os
import threading

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import EncodeError
from replicator.launchpad_bridge.graph import graph_of
from tests.launchpad_bridge import programs
from tests.launchpad_bridge.programs import SOON_S, program_of


def colocation(*nodes, **options):
    return lp.MultiProcessingColocation(nodes, **options)


def test_what_is_no_py_node_is_refused():
    with pytest.raises(ValueError, match="MultiProcessingColocation only works with"):
        colocation(object())


def test_one_without_nodes_is_refused_before_it_runs():
    with pytest.raises(lp.ProgramError, match="requires at least one node"):
        lp.launch(program_of(colocation()))


def test_it_is_no_part_of_another_colocation():
    with pytest.raises(lp.ProgramError, match="`node` must be one worker"):
        lp.MultiThreadingColocation([colocation(lp.PyNode(int))])


def test_its_nodes_are_the_workers_of_its_group():
    server = lp.CourierNode(programs.Counter)
    program = program_of(colocation(server))
    program.add_node(colocation(lp.PyNode(int, server.create_handle())), label="caller")
    with program.group("caller"):
        program.add_node(lp.PyNode(str))
    shown = graph_of(program)
    assert [vertex.name for vertex in shown.vertices] == [
        "node",
        "caller/0",
        "caller/1",
    ]
    assert [str(edge) for edge in shown.edges] == ["caller/0 -> node"]


@pytest.mark.slow
def test_it_runs_outside_of_a_program_as_often_as_wanted():
    node = colocation(lp.PyNode(int), lp.PyNode(str))
    assert [node.run(), node.run()] == [[0, ""], [0, ""]]


@pytest.mark.slow
def test_a_node_that_runs_one_stops_it_too():
    node = colocation(lp.PyNode(programs.wait_for_stop))
    with lp.launch(program_of(lp.PyNode(node.run)), stop_grace_s=4 * SOON_S) as run:
        pass
    assert run.results["node"] == [True]


@pytest.mark.slow
def test_what_fails_outside_of_a_program_is_told():
    with pytest.raises(lp.NodeFailedError, match="broken"):
        colocation(lp.PyNode(programs.fail, "broken")).run()


@pytest.mark.slow
@pytest.mark.parametrize("launch_type", ["threads", "processes"])
def test_each_inner_node_has_a_process_of_its_own_and_can_be_called(
    launch_type, tmp_path
):
    server = lp.CourierNode(programs.Counter)
    caller = lp.CourierNode(programs.Caller, server.create_handle())
    inner = [server, caller, *(lp.PyNode(programs.give_process) for _ in "ab")]
    run = lp.launch(program_of(colocation(*inner)), launch_type, log_dir=tmp_path)
    run.wait(4 * SOON_S)
    _, answer, *processes = run.results_of("node")
    assert answer == 1
    assert len({*processes, os.getpid()}) == 3


@pytest.mark.slow
def test_a_node_that_fails_is_started_again_as_often_as_said(tmp_path):
    path = str(tmp_path / "count")
    node = colocation(lp.PyNode(programs.fail_until, path, 2), num_retries_on_failure=2)
    run = lp.launch(program_of(node), "threads")
    run.wait(4 * SOON_S)
    assert run.results_of("node") == [3]


@pytest.mark.slow
def test_a_node_that_fails_once_too_often_fails_the_run(tmp_path):
    node = colocation(lp.PyNode(programs.fail, "broken"), num_retries_on_failure=1)
    run = lp.launch(program_of(node), "threads")
    with pytest.raises(lp.NodeFailedError, match="broken") as raised:
        run.wait(4 * SOON_S)
    assert "num_retries_on_failure (=1) is reached." in str(raised.value)
    assert run.workers["node"].attempt == 1


@pytest.mark.slow
def test_a_stop_reaches_the_processes():
    node = colocation(lp.PyNode(programs.wait_for_stop))
    # The stop may come before the process has imported what it waits with.
    with lp.launch(program_of(node), "threads", stop_grace_s=4 * SOON_S) as run:
        pass
    assert run.results["node"] is True


@pytest.mark.slow
@pytest.mark.parametrize("launch_type", ["threads", "processes"])
def test_a_result_of_an_inner_node_that_cannot_be_sent_says_so(launch_type, tmp_path):
    node = colocation(lp.PyNode(threading.Thread), lp.PyNode(int))
    run = lp.launch(program_of(node), launch_type, log_dir=tmp_path)
    run.wait(4 * SOON_S)
    assert run.results["node/1"] == 0
    with pytest.raises(EncodeError, match=r"`node/0` must return .*threading\.Thread"):
        run.results["node/0"]
