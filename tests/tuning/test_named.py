"""Strategies by the text of a command line."""

import pytest

from replicator import strategies
from replicator.errors import ArgumentError
from replicator.strategies import Machine
from replicator.tuning.named import builders_for, named_strategies


def test_names_with_arguments_and_without_are_built():
    found = named_strategies("fsdp, tensor_parallel({'w': (None, 'model')}, model=2)")
    assert [each.strategy for each in found] == [
        strategies.fsdp(),
        strategies.tensor_parallel({"w": (None, "model")}, model=2),
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fdsp", "must be one of data_parallel, .* got 'fdsp'"),
        ("os.system('true')", "must be one of data_parallel"),
        ("hybrid(shard=print)", r"what it takes, got 'hybrid\(shard=print\)'"),
        ("tensor_parallel", "missing 1 required positional argument: 'rules'"),
        ("hybrid(", "must be names of builders"),
        ("", "must be names of builders"),
    ],
)
def test_what_is_no_strategy_is_refused(text, part):
    with pytest.raises(ArgumentError, match=part):
        named_strategies(text)


@pytest.mark.parametrize(
    ("topology", "hybrid"),
    [("h100:2x8", "hybrid(shard=8)"), ("v5e:4x8", "hybrid(shard=8)")],
)
def test_pieces_of_hybrid_lie_where_links_are_fast(topology, hybrid):
    found = builders_for(Machine.from_topology(topology))
    assert found[-1].text == hybrid


def test_one_device_replicates():
    [only] = builders_for(Machine.from_topology("v5e:1x1"))
    assert only.text == "data_parallel"
