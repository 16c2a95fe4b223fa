import threading
import unittest

import pytest

import replicator.launchpad_bridge as lp
from tests.launchpad_bridge import programs
from tests.launchpad_bridge.programs import SOON_S, program_of


def test_a_failure_is_raised_in_a_test_that_waits_for_something_else():
    def launch_and_wait():
        lp.launch(program_of(lp.PyNode(programs.fail)), "test")
        threading.Event().wait(SOON_S)

    with pytest.raises(lp.NodeFailedError, match="`node` raised ValueError: oh no"):
        launch_and_wait()


def test_a_failure_after_the_test_that_launched_is_not_raised_in_another():
    may_fail = threading.Event()

    def fail_later():
        may_fail.wait(SOON_S)
        raise ValueError("late")

    def launch():
        program = program_of(lp.PyNode(fail_later))
        return lp.launch(program, "test", serialize_py_nodes=False)

    run = launch()
    may_fail.set()
    with pytest.raises(lp.NodeFailedError, match="late"):
        run.wait(SOON_S)


def test_nodes_may_be_stepped_by_the_test():
    program = program_of()
    node = lp.CourierNode(programs.Counter, 1)
    program.add_node(node, label="counter")
    node.disable_run()
    with lp.launch(program, "test"):
        counter = node.create_handle().dereference()
        assert [counter.add(1) for _ in range(3)] == [2, 3, 4]


def run_case(node):
    """Run a test case that launches a node, as `unittest` would; return both."""
    runs = []

    class Case(unittest.TestCase):
        def runTest(self):
            runs.append(lp.launch(program_of(node), "test_mt", test_case=self))

    result = unittest.TestResult()
    Case().run(result)
    return result, runs[0]


def test_a_test_case_fails_with_a_node_of_its_program():
    result, _ = run_case(lp.PyNode(programs.fail))
    assert "oh no" in result.errors[0][1]


def test_a_test_case_stops_its_program_at_its_end():
    result, run = run_case(lp.PyNode(programs.wait_for_stop))
    assert result.wasSuccessful(), result.errors
    assert run.is_over
    assert run.results == {"node": True}
