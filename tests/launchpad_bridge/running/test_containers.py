import collections
import types
from typing import Any, NamedTuple

import attrs
import pytest

from replicator.launchpad_bridge.running.containers import leaves_with_paths, map_leaves


class Pair(NamedTuple):
    left: Any
    right: Any


@attrs.define
class Settings:
    rate: Any
    _hidden: Any


STRUCTURES = {
    "list": [1, [2, 3]],
    "tuple": (1, (2,), ()),
    "dict": {"a": 1, "b": {"c": 2}},
    "ordered": collections.OrderedDict(z=1, a=2),
    "default": collections.defaultdict(list, {"a": 1}),
    "named tuple": Pair(1, Pair(2, 3)),
    "attrs": Settings(1, hidden=[2]),
    "leaf": 1,
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_containers_keep_their_type_and_order(structure):
    same = map_leaves(lambda leaf: leaf, structure)
    assert same == structure
    assert type(same) is type(structure)
    assert list(leaves_with_paths(same)) == list(leaves_with_paths(structure))


def test_leaves_are_replaced_wherever_they_stand():
    structure = {"a": [1, (2, Pair(3, None))], "b": Settings(4, hidden=5)}
    changed = map_leaves(lambda leaf: leaf and leaf * 10, structure)
    assert changed == {"a": [10, (20, Pair(30, None))], "b": Settings(40, hidden=50)}


def test_a_path_is_the_expression_that_leads_to_a_leaf():
    structure = {"a": [0, Pair(1, Settings(2, hidden=3))]}
    paths = dict(leaves_with_paths(structure, "args"))
    assert paths == {
        "args['a'][0]": 0,
        "args['a'][1].left": 1,
        "args['a'][1].right.rate": 2,
        "args['a'][1].right._hidden": 3,
    }


def test_a_read_only_view_becomes_a_dict():
    view = types.MappingProxyType({"a": 1})
    assert map_leaves(str, view) == {"a": "1"}


def test_a_container_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ValueError, match="does a container hold itself"):
        map_leaves(str, loop)
    with pytest.raises(ValueError, match="does a container hold itself"):
        list(leaves_with_paths(loop))
