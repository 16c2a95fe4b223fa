import functools
import pickle
import sys
import threading

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.protocols import Executable


class Holder:
    def __init__(self, *args, **kwargs):
        pass


def executable_of(node):
    run = type("Run", (), {"node": node, "__reduce__": lambda self: (list, (node,))})()
    return Executable(label="group", index=0, name="group/0", run=run)


LOCK = threading.Lock()
CULPRITS = {
    "args[0]": lp.CourierNode(Holder, LOCK),
    "kwargs['deep'][1]['x']": lp.CourierNode(Holder, deep=[1, {"x": LOCK}]),
    "args[0].lock": lp.PyNode(print, type("Own", (), {})()),
    "args[0].args[1]": lp.PyNode(print, lp.Deferred(Holder, 1, LOCK)),
    "the function": lp.PyNode(lambda: LOCK.locked()),
}
CULPRITS["args[0].lock"]._args[0].lock = LOCK


@pytest.mark.parametrize(("path", "node"), CULPRITS.items(), ids=CULPRITS)
def test_what_does_not_pickle_is_named_with_three_ways_out(path, node):
    with pytest.raises(RuntimeError, match="not serializable using cloudpickle") as e:
        recipes.pack(executable_of(node))
    text = str(e.value)
    assert f"cloudpickle: {path} (" in text
    assert "'group/0'" in text
    for way in ("lp.Deferred", "__getstate__", "serialize_py_nodes=False"):
        assert way in text


def test_functions_of_a_script_and_closures_travel():
    number = 3
    node = lp.PyNode(lambda x: x + number, 4)
    assert recipes.loads(recipes.dumps(node.function))() == 7


def test_a_cached_function_travels_without_what_it_remembers():
    @functools.lru_cache(maxsize=7)
    def square(x):
        return x * x

    square(3)
    twin = recipes.loads(recipes.dumps(square))
    assert twin(4) == 16
    assert twin.cache_info()[2:] == (7, 1)


def test_a_cached_function_of_a_script_is_found_there_by_its_name(monkeypatch):
    def area(side):
        return side * side

    area.__module__, area.__qualname__ = "__main__", "area"
    cached = functools.lru_cache(area)
    monkeypatch.setattr(sys.modules["__main__"], "area", cached, raising=False)
    run = lp.PyNode(cached, 3)
    packed = recipes.pack(Executable(label="a", index=0, name="a", run=run))
    _, _, defined = recipes.loads(packed)
    assert defined["area"](3) == 9


def test_what_stands_for_a_script_is_whole_though_a_worker_died_writing_it(tmp_path):
    (tmp_path / "recipe.py").touch()
    path = recipes._in_place_of_script(tmp_path / "recipe")
    assert "find_definition" in path.read_text()


def test_a_node_travels_without_its_program_and_its_object():
    program = lp.Program("heavy")
    program.unpicklable = threading.Lock()
    node = lp.PyClassNode(Holder)
    program.add_node(node, label="a")
    node._construct_instance()
    twin = recipes.loads(recipes.dumps(node))
    assert twin.owner is None
    assert not twin._is_constructed


def test_a_test_checks_that_nodes_pickle_unless_told_otherwise():
    def program():
        return lp.make_program(lp.PyNode(threading.Lock().acquire))

    with pytest.raises(lp.LaunchError, match="not serializable"):
        lp.launch(program(), "test")
    lp.launch(program(), "test", serialize_py_nodes=False).wait()


def test_pickles_of_ours_are_plain_pickles():
    assert pickle.loads(recipes.dumps({"a": 1})) == {"a": 1}


@pytest.mark.parametrize("launch_type", ["threads", "processes"])
def test_a_process_that_does_not_pickle_is_refused_before_any_starts(launch_type):
    program = lp.make_program(
        lp.JaxProcesses(threading.Lock().acquire, processes=2), lp.PyNode(int)
    )
    with pytest.raises(lp.LaunchError, match="not serializable") as refused:
        lp.launch(program, launch_type)
    assert "or launch with threads" not in str(refused.value)
