import re

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.graph_check import check_graph


class Service:
    def __init__(self, *others, **named):
        pass

    def ping(self):
        return "pong"


def node(*args, **kwargs):
    return lp.CourierNode(Service, *args, **kwargs)


def chain():
    program = lp.Program("chain")
    a = program.add_node(node(), label="a")
    with program.group("b"):
        program.add_node(node(a))
        program.add_node(node({"deep": [a]}))
    return program


def test_edges_are_named_by_their_workers_and_arguments():
    edges = check_graph(chain())
    assert [str(edge) for edge in edges] == ["b/0 -> a", "b/1 -> a"]
    assert [edge.argument for edge in edges] == ["args[0]", "args[0]['deep'][0]"]


def test_edges_of_inner_nodes_are_those_of_their_worker():
    program = chain()
    handle = program.groups["a"][0].create_handle()
    inner = lp.MultiThreadingColocation([node(handle), lp.PyNode(print, handle)])
    program.add_node(inner, label="c")
    assert [str(edge) for edge in check_graph(program)][2:] == ["c -> a", "c -> a"]


def no_nodes():
    return lp.Program("empty")


def bad_label():
    program = lp.Program("p")
    program.add_node(node(), label="a/b")
    return program


def added_twice():
    program, twice = lp.Program("p"), node()
    program.add_node(twice, label="a")
    program.add_node(twice, label="b")
    return program


def added_and_colocated():
    program, twice = lp.Program("p"), node()
    program.add_node(twice, label="a")
    program.add_node(lp.MultiThreadingColocation([twice]), label="b")
    return program


def in_two_programs():
    program, twice = lp.Program("p"), node()
    program.add_node(twice, label="a")
    lp.Program("other").add_node(twice, label="a")
    return program


def foreign_handle():
    foreign = lp.Program("other").add_node(node(), label="theirs")
    program = lp.Program("p")
    program.add_node(node(key=[foreign]), label="a")
    return program


def orphan_handle():
    program = lp.Program("p")
    program.add_node(node(lp.Deferred(list, node().create_handle())), label="a")
    return program


def circle():
    program, to_a = lp.Program("p"), []
    a = program.add_node(node(to_a), label="a")
    b = program.add_node(node(a), label="b")
    to_a.append(program.add_node(node(b), label="c"))
    return program


def own_handle():
    program, to_a = lp.Program("p"), []
    to_a.append(program.add_node(node(to_a), label="a"))
    return program


def endless_arguments():
    loop: list = []
    loop.append(loop)
    program = lp.Program("p")
    to_a: list = []
    program.add_node(node(to_a), label="a")
    to_a.append(loop)
    return program


def no_node():
    program = lp.Program("p")
    program.add_node(type("Odd", (), {"create_handle": lambda self: None})(), label="a")
    return program


REFUSED = {
    no_nodes: "`program` must hold a node, got 'empty' without one.",
    bad_label: "`label` must be at most 100 letters",
    added_twice: "A node must be added once, got <CourierNode 'b' Service> in 'a' and",
    added_and_colocated: "in 'a' and again in 'b' of 'p'.",
    in_two_programs: "got 'a' of 'p' in the program 'other' too.",
    foreign_handle: "got one of 'theirs' of the other program 'other' in "
    "kwargs['key'][0] of 'a'. Put both nodes into one program.",
    orphan_handle: "which was added to no program, in args[0].args[0] of 'a'.",
    circle: "got a -> c -> b -> a: each is an argument of the one before.",
    own_handle: "got a -> a: each is",
    endless_arguments: "The arguments of 'a' cannot be read",
    no_node: "`node` must be one that a launcher can run",
}


@pytest.mark.parametrize(
    ("build", "text"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", None)
)
def test_a_graph_that_cannot_run_is_refused_before_it_starts(build, text):
    with pytest.raises(lp.ProgramError, match=re.escape(text)):
        lp.launch(build())


def test_a_circle_is_fine_where_one_node_was_configured():
    program, a = lp.Program("p"), node()
    b = program.add_node(node(a.create_handle()), label="b")
    a.configure(b)
    program.add_node(a, label="a")
    assert {str(edge) for edge in check_graph(program)} == {"a -> b", "b -> a"}


def test_a_program_that_runs_is_not_launched_again():
    program = chain()
    refused = pytest.raises(lp.ProgramError, match="must not be running")
    with lp.launch(program), refused:
        lp.launch(program)


def test_resources_of_a_group_that_is_not_there_are_refused():
    with pytest.raises(lp.ProgramError, match="must name groups of 'chain'"):
        lp.launch(chain(), resources={"actor": lp.Resources(cpus=1)})


def test_resources_must_be_resources():
    with pytest.raises(ValueError, match="Launch config for a must be a PythonProcess"):
        lp.launch(chain(), resources={"a": {"cpus": 1}})
