"""Strategies by the text of a command line."""

import pytest

from replicator import strategies
from replicator.errors import ArgumentError
from replicator.tuning.named import named_strategies


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
        ("hybrid(shard=print)", r"got 'hybrid\(shard=print\)': arguments are literals"),
        ("fsdp(*[1])", r"got 'fsdp\(\*\[1\]\)': arguments are literals, each by"),
        ("fsdp(**{'uneven': 'pad'})", "arguments are literals, each by itself"),
        ("tensor_parallel", "missing 1 required positional argument: 'rules'"),
        ("hybrid(", "must be names of builders"),
        ("", "must be names of builders"),
    ],
)
def test_what_is_no_strategy_is_refused(text, part):
    with pytest.raises(ArgumentError, match=part):
        named_strategies(text)
