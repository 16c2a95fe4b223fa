"""Candidates for a model on a machine, with their forecasts: no device."""

from replicator.strategies import Machine, Variable
from replicator.tuning.choosing.candidates import (
    Work,
    candidates_for,
    strategies_for,
)

CUT = {"w": (None, "model")}


def machine(hosts=2, each=4):
    nodes = [
        f"{{address: 10.0.0.{n + 1}, chief: {str(n == 0).lower()}, "
        f"gpus: {list(range(each))}}}"
        for n in range(hosts)
    ]
    return Machine.from_yaml(f"device: Tesla T4\nnodes: [{', '.join(nodes)}]")


def work(examples=16, width=1024):
    w = Variable(path="w", shape=(width, width), dtype="float32", follows="w")
    return Work(
        variables=(w,),
        examples=examples,
        batch_bytes=examples * width * 4,
        flops={"float32": 6 * examples * width**2},
        product_bytes=3 * width**2 * 4,
    )


def found(machine, work, **options):
    strategies = strategies_for(machine, **options)
    return {each.name: each for each in candidates_for(strategies, work, machine)}


def test_one_device_has_one_candidate():
    assert list(strategies_for(Machine.from_topology("h100:1"))) == ["data_parallel"]


def test_no_group_straddles_hosts():
    names = strategies_for(machine(hosts=2, each=6))
    shards = [name for name in names if name.startswith("hybrid")]
    assert shards == ["hybrid(shard=2)", "hybrid(shard=3)", "hybrid(shard=6)"]


def test_tensor_parallel_needs_rules():
    assert not [n for n in strategies_for(machine()) if n.startswith("tensor")]
    names = strategies_for(machine(), tensor_rules=CUT)
    assert "tensor_parallel(model=8, replicas=1)" in names


def test_lossy_ones_are_there_if_asked_for():
    exact = strategies_for(machine(), rules=True)
    assert "data_parallel(hierarchical)" in exact
    assert not [name for name in exact if "int8" in name]
    assert "data_parallel(int8)" in strategies_for(machine(), rules=True, lossy=True)


def test_a_batch_that_does_not_divide_is_said():
    few = found(machine(), work(examples=4), tensor_rules=CUT)
    assert few["fsdp"].status == "does not divide"
    assert few["fsdp"].why == "4 examples over 8 parts"
    assert few["tensor_parallel(model=4, replicas=2)"].status == "waiting"


def test_a_dimension_that_does_not_divide_is_said():
    odd = found(machine(), work(width=1020), tensor_rules=CUT)
    cut = odd["tensor_parallel(model=8, replicas=1)"]
    assert cut.status == "does not divide"
    assert "`w` must divide" in cut.why


def test_a_state_in_pieces_needs_less():
    both = found(machine(), work())
    saved = both["data_parallel"].least_bytes - both["fsdp"].least_bytes
    assert saved == 1024 * 1024 * 4 * 7 // 8


def test_bytes_between_hosts_are_apart():
    sent = found(machine(), work())["hybrid(shard=4)"].link_bytes
    assert set(sent) == {"host", "network"}


def test_no_forecast_is_below_its_bound():
    for each in found(machine(), work(), rules=True, lossy=True).values():
        assert each.bound_s <= each.predicted_s
