"""Each method of the library that a network can call says what it takes."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import replicator
import replicator.launchpad_bridge as lp
from benchmarks.rpc_attack.methods import ATTACKS
from benchmarks.rpc_attack.offered import CALLS
from replicator.base.accepts import accepted_by
from replicator.checkpoint.copies.keeper import Keeper
from replicator.controller.islands.server import IslandService
from replicator.distributed.piece_transfer import _Giver
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.addresses.address_books import OfferedRegistry
from replicator.launchpad_bridge.compat.courier_node import CourierNode
from replicator.launchpad_bridge.learner.learner import ReplicatedLearner
from replicator.launchpad_bridge.learner.published import PublishedVariables
from replicator.launchpad_bridge.nodes.cacher_node import Cacher
from replicator.rpc.server.methods import methods_of

SERVED = {
    lp.TrajectoryQueue: "queue",
    lp.TrajectoryTurns: "turns",
    lp.ReplayTable: "replay",
    ReplicatedLearner: "learner",
    lp.InferenceServer: "inference",
    PublishedVariables: "variables",
    Cacher: "cacher",
    OfferedRegistry: "registry",
    lp.Actor: "actor",
    Keeper: "keeper",
    _Giver: "pieces",
    IslandService: "island",
}
PACKAGE = Path(replicator.__file__).parent
SERVING = {"CourierNode", "Server", "RpcServer"}


def described(cls):
    return {name for name, found in vars(cls).items() if accepted_by(found) is not None}


def classes_of_ours():
    for name, module in sys.modules.copy().items():
        if name.startswith("replicator."):
            yield from (
                each
                for each in vars(module).copy().values()
                if isinstance(each, type) and each.__module__ == name
            )


def test_all_classes_with_such_methods_are_attacked():
    assert {cls for cls in classes_of_ours() if described(cls)} == set(SERVED)


@pytest.mark.parametrize("cls", SERVED, ids=lambda cls: cls.__name__)
def test_every_method_is_attacked_with_every_argument(cls):
    if cls is Cacher:  # its one method stands for all of its target
        assert described(cls) == {"answer"}
        return
    given = {}
    for method, arguments in CALLS[SERVED[cls]]:
        given.setdefault(method, set()).update(arguments)
    assert given == {name: set(accepted_by(getattr(cls, name))) for name in given}
    assert set(given) == described(cls)
    for kind in ("ranges", "counts", "empty_rows", "deep_trees", "long_names"):
        assert f"{kind}_for_{SERVED[cls]}" in ATTACKS


def test_whatever_the_library_serves_is_among_them():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        if not re.search(r"(CourierNode|Server|__init__)\(\s*[A-Z]", source):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                first = getattr(node.args[0], "id", "")
                is_serving = name in SERVING or first == "Cacher"
                found |= {first} if is_serving and first[:1].isupper() else set()
    assert found == {"ReplicatedLearner", "Cacher"}


def test_a_class_of_the_library_offers_what_says_what_it_takes():
    class Forgetful:
        def say(self, word):
            return word

    assert [*methods_of(Forgetful())] == ["say"]
    Forgetful.__module__ = "replicator.launchpad_bridge.acting.forgetful"
    with pytest.raises(ArgumentError, match="must declare a public method"):
        methods_of(Forgetful())


def test_what_users_add_to_a_class_of_the_library_is_offered():
    class Own(lp.TrajectoryQueue):
        def peek(self):
            return 3

    assert set(methods_of(Own(4))) == {*methods_of(lp.TrajectoryQueue(4)), "peek"}


def test_what_only_a_node_calls_is_not_offered_by_a_node_of_the_drop_in_either():
    inference = lp.InferenceServer(lambda *given: given, None)
    assert set(methods_of(inference)) == {"act", "get_version", "statistics"}
    offered = CourierNode(lp.InferenceServer).methods(inference)
    assert {method.name for method in offered} == set(methods_of(inference))


@pytest.mark.parametrize("rows", [3, 1])
def test_rows_that_do_not_fit_each_other_join_no_batch(rows):
    inference = lp.InferenceServer(lambda *given: given, None)
    first, key, place = np.ones(2, bool), np.zeros(2, np.uint32), np.zeros(2, np.int32)
    with pytest.raises(ArgumentError, match="must have 2 rows, as `first` has"):
        inference.act(np.ones((rows, 3)), first, (), key, place)
