"""AutoDist's names stand for strategies of ours."""

import inspect

import pytest

from replicator import strategies
from replicator.errors import ArgumentError
from replicator.strategies import Rule, autodist

ROWS = strategies.data_parallel([Rule(pattern="*", synchronise="rows")])
OURS = {
    "PS": strategies.zero1(),
    "PSLoadBalancing": strategies.zero1(),
    "PartitionedPS": strategies.fsdp(),
    "UnevenPartitionedPS": strategies.fsdp(uneven="pad"),
    "AllReduce": strategies.data_parallel(),
    "PartitionedAR": strategies.data_parallel(),
    "RandomAxisPartitionAR": strategies.data_parallel(),
    "Parallax": ROWS,
}
STALE = [
    name
    for name in OURS
    if "sync" in inspect.signature(getattr(autodist, name)).parameters
]


@pytest.mark.parametrize("name", OURS)
def test_each_builder_is_one_of_ours(name):
    assert getattr(autodist, name)() == OURS[name]


def test_all_eight_are_there():
    assert set(autodist.__all__) == set(OURS)


@pytest.mark.parametrize("compressor", ["HorovodCompressor", "HorovodCompressorEF"])
def test_a_compressor_makes_numbers_narrow(compressor):
    rule = Rule(pattern="*", compress="f16")
    assert autodist.AllReduce(compressor=compressor) == strategies.data_parallel([rule])


@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize(
    "old", [{"sync": False}, {"staleness": 2}, {"staleness": True}]
)
def test_old_parameters_are_refused(name, old):
    with pytest.raises(ArgumentError, match="must be True with `staleness=0`"):
        getattr(autodist, name)(**old)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"compressor": "TopK"}, "compressor"),
        ({"all_reduce_spec": "MPI"}, "all_reduce_spec"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_what_autodist_does_not_know_is_refused(given, name):
    with pytest.raises(ArgumentError, match=f"`{name}` must be"):
        autodist.AllReduce(**given)
