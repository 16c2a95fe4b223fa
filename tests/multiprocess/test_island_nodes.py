"""Islands that are nodes of a program, and a controller in another node of it."""

import pytest

import replicator.launchpad_bridge as lp
from tests.multiprocess import island_nodes as nodes

pytestmark = pytest.mark.slow

TIMEOUT_S = 300.0


def program_on(make, *args, restart=None):
    """Return a program of a controller, and of islands of two devices and of one."""
    program = lp.Program("islands")
    islands = []
    for devices in (2, 1):
        node = make(devices)
        with program.group(f"island{2 - devices}", restart=restart):
            islands.append(program.add_node(node))
    with program.group("controller", resources=nodes.CPU):
        program.add_node(lp.PyNode(*args[:1], islands, *args[1:]))
    return program


def test_a_controller_in_a_node_computes_on_islands_of_others(running):
    program = program_on(lambda n: lp.IslandNode(devices=n), nodes.compute)
    with running(program) as run:
        run.wait(TIMEOUT_S)
    assert run.results["controller"] == [3.0, 3.0]


def test_an_island_that_is_killed_is_lost_by_name_and_joins_again(tmp_path):
    program = program_on(
        lambda n: nodes.ToldIsland(tmp_path / f"{n}", devices=n),
        nodes.outlive,
        tmp_path / "2",
        restart=lp.Restart(attempts=1, backoff_s=0.1),
    )
    with lp.launch(program, "processes", log_dir=tmp_path / "logs") as run:
        run.wait(TIMEOUT_S)
    before, lost, after = run.results["controller"]
    assert before == after == [3.0, 3.0]
    assert "island0" in lost
    assert "was lost" in lost
    assert run.workers["island0"].attempt == 1
