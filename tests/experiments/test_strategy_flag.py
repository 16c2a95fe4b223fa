import typing

import pytest

from experiments.strategy_flag import StrategyName, named_strategy
from replicator.errors import ArgumentError

NAMES = typing.get_args(StrategyName)
RULES = {"*/kernel": (None, "model")}


def named(name, devices):
    return named_strategy(name, devices, tensor_parallel=RULES, pieces=4)


@pytest.mark.parametrize("devices", [2, 6, 8, 12])
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_uses_all_devices_and_cuts_something(name, devices):
    strategy = named(name, devices)
    sizes = strategy.sizes(devices)

    assert strategy.name == name
    assert sizes["replica"] * sizes["shard"] * sizes["model"] == devices
    assert 4 % sizes["model"] == 0
    assert name == "data_parallel" or sizes["shard"] * sizes["model"] > 1


def test_one_device_has_nothing_to_cut():
    assert named("data_parallel", 1).kind == "replicates"
    with pytest.raises(ArgumentError, match="must be data_parallel on one device"):
        named("fsdp", 1)


def test_devices_among_which_heads_cannot_be_divided_are_refused():
    with pytest.raises(ArgumentError, match="some of 4 pieces, got tensor_parallel on"):
        named("tensor_parallel", 3)
