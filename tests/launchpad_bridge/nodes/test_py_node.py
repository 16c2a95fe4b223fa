import pytest

import replicator.launchpad_bridge as lp


class Worker:
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def run(self):
        return self.args, self.kwargs


class Fixed(lp.Handle):
    def dereference(self):
        return "client"


def test_a_py_node_runs_its_function_with_clients_for_handles():
    node = lp.PyNode(lambda *a, **k: (a, k), 1, [Fixed()], key={"x": Fixed()})
    assert node.function() == ((1, ["client"]), {"key": {"x": "client"}})
    assert len(node.input_handles) == 2


def test_a_py_class_node_makes_its_object_once_and_runs_it():
    node = lp.PyClassNode(Worker, Fixed(), key=lp.Deferred(int, 3))
    assert node.function() == (("client",), {"key": 3})
    assert node._construct_instance() is node._construct_instance()


def test_a_py_class_node_does_not_run_what_is_disabled_or_not_there(caplog):
    node = lp.PyClassNode(Worker, 1)
    node.disable_run()
    assert node.function() is None
    assert "run() not defined on the instance" in caplog.text
    node.enable_run()
    assert node.function() == ((1,), {})
    assert lp.PyClassNode(dict).function() is None


def test_handles_that_come_later_into_a_list_are_found():
    later: list = []
    node = lp.PyNode(print, later)
    assert node.input_handles == []
    later.append(Fixed())
    assert len(list(node.inputs())) == 1


def test_a_node_knows_how_it_is_launched_only_then():
    node = lp.PyNode(print)
    with pytest.raises(RuntimeError, match="Launch context is not yet initialized"):
        _ = node.launch_context.launch_type
    lp.launch(lp.make_program(node)).wait()
    assert node.launch_context.launch_type is lp.LaunchType.LOCAL_MULTI_THREADING


def test_a_handle_is_told_of_the_node_that_uses_it():
    told = []

    class Told(Fixed):
        def connect(self, node, label):
            told.append((node, label))

    node = lp.PyNode(len, Told())
    program = lp.Program("p")
    program.add_node(node, label="reader")
    lp.launch(program).wait()
    assert told == [(node, "reader")]


def test_a_node_of_the_users_own_runs():
    class Own(lp.Node):
        def create_handle(self):
            return self._track_handle(Fixed())

        @staticmethod
        def to_executables(nodes, label, launch_context):
            return [lambda: (label, launch_context.launch_type.value) for _ in nodes]

    program = lp.Program("p")
    program.add_node(Own(), label="own")
    run = lp.launch(program)
    run.wait()
    assert run.results == {"own": ("own", "local_mt")}
