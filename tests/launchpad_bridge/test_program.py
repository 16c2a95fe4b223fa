import re

import pytest

import replicator.launchpad_bridge as lp


class Anything:
    """What a program takes for a node: it makes a handle."""

    def create_handle(self):
        return "handle"


def test_nodes_stand_in_groups_in_the_order_they_were_added():
    program, nodes = lp.Program("p"), [Anything() for _ in range(4)]
    assert program.add_node(nodes[0], "foo") == "handle"
    with program.group("bar"):
        program.add_node(nodes[1])
        program.add_node(nodes[2], label="bar")
    with program.group("foo"):
        program.add_node(nodes[3])
    assert program.groups == {"foo": [nodes[0], nodes[3]], "bar": nodes[1:3]}
    assert program.get_all_nodes() == [nodes[0], nodes[3], nodes[1], nodes[2]]


def nested(program):
    with program.group("a"), program.group("b"):
        pass


def other_label(program):
    with program.group("a"):
        program.add_node(Anything(), label="b")


def no_group(program):
    with program.group(""):
        pass


REFUSED = [
    (lambda p: p.add_node(Anything()), "Label should not be empty."),
    (lambda p: p.add_node(Anything(), label=""), "Label should not be empty."),
    (no_group, "Label should not be empty."),
    (nested, "group() cannot be nested."),
    (other_label, "The given label does not match the current group: b vs a."),
]


@pytest.mark.parametrize(("build", "text"), REFUSED)
def test_a_bad_label_is_refused(build, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build(lp.Program("p"))


def test_a_group_is_open_only_inside_of_its_block():
    program = lp.Program("p")
    with program.group("a"):
        assert program.current_group == "a"
    with pytest.raises(ValueError, match="current_group"):
        _ = program.current_group


def test_a_group_that_fails_to_build_is_closed():
    program = lp.Program("p")
    with pytest.raises(ValueError, match="does not match"):
        other_label(program)
    program.add_node(Anything(), label="c")


def test_a_group_keeps_what_was_said_of_it_when_it_is_opened_again():
    program, resources = lp.Program("p"), lp.Resources(cpus=2)
    with program.group("a", resources=resources):
        pass
    with program.group("a", restart=lp.Restart(attempts=1)):
        pass
    assert program.settings("a").resources == resources
    assert program.settings("a").restart == lp.Restart(attempts=1)
    another = program.group("a", resources=lp.Resources(cpus=3))
    with pytest.raises(ValueError, match="must be set once"), another:
        pass


def test_a_program_is_made_of_nodes_in_one_line():
    program = lp.make_program(lp.PyNode(print), lp.PyNode(print), name="quick")
    assert program.name == "quick"
    assert list(program.groups) == ["node0", "node1"]
