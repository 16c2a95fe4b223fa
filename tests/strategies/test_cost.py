"""Predicted seconds: arithmetic, memory, and the slowest level that a ring passes."""

import jax.numpy as jnp
import pytest

from replicator import strategies
from replicator.errors import ArgumentError
from replicator.strategies.cost import (
    Features,
    Traffic,
    forecast,
    predict,
    traffic_over,
)
from replicator.strategies.machine import Machine
from replicator.strategies.variables import Variable, variables_of

POD = Machine.from_topology("v5e:16x16")
GPUS = Machine.from_topology("h100:4x8")
GIGA = 10**9


def seconds(machine, mesh, axes, *, kind="all-gather", giga=1, count=0):
    """Return the seconds by level of so many bytes sent along axes."""
    traffic = traffic_over(kind, axes, mesh, giga * GIGA, count)
    features = Features(num_devices=1, flops={}, traffic=(traffic,))
    return dict(predict(features, machine).links_s)


def test_arithmetic_is_divided_by_the_peak_of_its_dtype():
    features = Features(num_devices=1, flops={"int8": 393e12, "bfloat16": 197e12})
    assert predict(features, POD).arithmetic_s == pytest.approx(2)


def test_memory_is_divided_by_its_bandwidth():
    features = Features(num_devices=1, flops={}, memory_bytes=819e9)
    assert predict(features, POD).memory_s == pytest.approx(1)


def test_a_prediction_runs_from_the_longest_part_to_device_and_links():
    mesh = {"replica": 256}
    traffic = traffic_over("all-gather", ("replica",), mesh, 100 * GIGA, 0)
    features = Features(
        num_devices=256,
        flops={"bfloat16": 197e12},
        memory_bytes=819e8,
        traffic=(traffic,),
    )
    found = predict(features, POD)
    assert found.low_s == pytest.approx(1)
    assert found.high_s == pytest.approx(1.5)
    assert str(found) == "1 to 1.5 s: arithmetic 1, memory 0.1, torus 0.5"


def test_a_group_in_one_host_uses_its_links():
    assert seconds(GPUS, {"shard": 8}, ["shard"]) == {"host": 1 / 450}
    assert seconds(GPUS, {"replica": 4, "shard": 8}, ["shard"]) == {"host": 1 / 450}


def test_a_ring_over_two_levels_is_as_slow_as_the_slower():
    # One ring has all eight adapters of a host: 400 GB/s, less than 450.
    assert seconds(GPUS, {"shard": 32}, ["shard"]) == {"network": 1 / 400}


def test_rings_beside_each_other_share_the_links_of_a_host():
    found = seconds(GPUS, {"replica": 4, "shard": 8}, ["replica"])
    assert found == {"network": 1 / 50}


def test_a_fast_network_leaves_the_host_the_slower():
    machine = Machine.from_yaml(
        "device: Tesla T4\nnodes:\n"
        "- {address: a, chief: true, gpus: [0, 1], network_bandwidth: 800}\n"
        "- {address: b, gpus: [0, 1], network_bandwidth: 800}"
    )
    assert seconds(machine, {"replica": 4}, ["replica"]) == {"host": 1 / 16}


def test_a_group_that_lies_across_unequal_hosts_takes_the_network():
    machine = Machine.from_yaml(
        "device: Tesla T4\nnodes:\n"
        "- {address: a, chief: true, gpus: [0, 1, 2, 3]}\n- {address: b, gpus: [0, 1]}"
    )
    inside = seconds(machine, {"replica": 3, "shard": 2}, ["shard"])
    across = seconds(machine, {"replica": 2, "shard": 3}, ["shard"])
    assert (list(inside), list(across)) == (["host"], ["network"])


def test_a_group_over_a_whole_torus_has_all_its_links():
    assert seconds(POD, {"shard": 256}, ["shard"]) == {"torus": 1 / 200}


def test_a_group_along_one_dimension_has_half_of_them():
    mesh = {"shard": 16, "model": 16}
    assert seconds(POD, mesh, ["shard"]) == {"torus": 1 / 100}
    assert seconds(POD, mesh, ["model"]) == {"torus": 1 / 100}


def test_a_dimension_that_is_not_closed_has_a_half_again():
    small = Machine.from_topology("v5e:8x16")
    mesh = {"shard": 8, "model": 16}
    assert seconds(small, mesh, ["shard"]) == {"torus": 1 / 50}
    assert seconds(small, mesh, ["model"]) == {"torus": 1 / 100}


def test_chips_between_the_members_of_a_group_use_the_same_links():
    # Four chips of a dimension, with three between each two.
    found = seconds(POD, {"replica": 16, "shard": 4, "model": 4}, ["shard"])
    assert found == {"torus": pytest.approx(1 / (50 / 4))}


def test_the_cores_of_a_chip_share_its_links():
    pod = Machine.from_topology("v3:32x32")
    assert seconds(pod, {"replica": 2048}, ["replica"]) == {"torus": 1 / 328}
    mesh = {"replica": 1024, "model": 2}
    assert seconds(pod, mesh, ["replica"]) == {"torus": 2 / 328}
    assert seconds(pod, mesh, ["model"]) == {"chip": 1 / 450}


def test_copies_on_two_slices_meet_over_the_network():
    two = Machine.from_topology("v5e:16x16", slices=2)
    mesh = {"replica": 2, "shard": 256}
    assert seconds(two, mesh, ["replica"]) == {"network": 1 / 3.125}
    assert seconds(two, mesh, ["shard"]) == {"torus": 1 / 200}


def test_an_exchange_over_a_ring_passes_the_chips_between():
    mesh = {"shard": 16, "model": 16}
    found = seconds(POD, mesh, ["model"], kind="all-to-all")
    assert found == {"torus": 4 / 100}


@pytest.mark.parametrize(
    ("machine", "mesh", "kind", "hops"),
    [
        (GPUS, {"replica": 8}, "all-gather", 7 * 3.4e-6),
        (GPUS, {"replica": 8}, "all-reduce", 14 * 3.4e-6),
        (GPUS, {"replica": 32}, "all-gather", 3 * 14e-6),
        (POD, {"replica": 256}, "all-gather", 16e-6),
        (Machine.from_topology("v5e:4x4"), {"replica": 16}, "all-gather", 6e-6),
    ],
)
def test_each_collective_waits_for_its_hops(machine, mesh, kind, hops):
    found = seconds(machine, mesh, [], kind=kind, giga=0, count=10)
    assert max(found.values()) == pytest.approx(10 * hops)


def test_a_machine_with_fewer_devices_is_refused():
    with pytest.raises(ArgumentError, match="must have the 512 devices of the step"):
        predict(Features(num_devices=512, flops={}), POD)


def test_a_machine_without_figures_is_refused():
    machine = Machine.from_yaml("nodes: [{address: a, gpus: [0, 1]}]")
    with pytest.raises(ArgumentError, match="devices --calibrate"):
        predict(Features(num_devices=2, flops={}), machine)


WEIGHT = Variable(path="w", shape=(1024, 1024), dtype="float32", follows="w")
MOMENT = Variable(
    path="opt/w", shape=(1024, 1024), dtype="float32", follows="w", is_optimizer=True
)


@pytest.mark.parametrize(
    ("strategy", "traffic"),
    [
        (strategies.data_parallel(), {("all-reduce", ("replica",)): 2 * 7 / 8}),
        (
            strategies.zero1(),
            {("all-reduce", ("shard",)): 2 * 7 / 8, ("all-gather", ("shard",)): 7 / 8},
        ),
        (
            strategies.fsdp(),
            {
                ("all-gather", ("shard",)): 2 * 7 / 8,
                ("reduce-scatter", ("shard",)): 7 / 8,
            },
        ),
        (
            strategies.hybrid(shard=4),
            {
                ("all-gather", ("shard",)): 2 * 3 / 4,
                ("reduce-scatter", ("shard",)): 3 / 4,
                ("all-reduce", ("replica",)): 2 / 2 / 4,
            },
        ),
    ],
)
def test_a_forecast_has_the_collectives_of_each_strategy(strategy, traffic):
    found = forecast(strategy, [WEIGHT, MOMENT], 8, flops={})
    sent = {(each.kind, each.axes): each.wire_bytes for each in found.traffic}
    assert sent == {key: part * 2**22 for key, part in traffic.items()}


def test_a_forecast_sends_what_the_table_says():
    state = {"params": {"w": jnp.ones((64, 128))}, "opt": {"w": jnp.ones((64, 128))}}
    variables = variables_of(state)
    for strategy in (strategies.fsdp(), strategies.zero2(), strategies.hybrid(shard=2)):
        found = forecast(strategy, variables, 8, flops={})
        last = strategies.table(strategy, variables, 8).splitlines()[-1]
        assert f"{sum(each.wire_bytes for each in found.traffic):,}" == last.split()[-1]


def test_a_forecast_counts_the_state_read_and_written():
    found = forecast(
        strategies.fsdp(), [WEIGHT, MOMENT], 8, flops={"float32": 80}, memory_bytes=800
    )
    assert found.memory_bytes == 100 + 2 * 2 * 2**22 / 8
    assert found.flops == {"float32": 10}


def test_groups_of_one_axis_lie_where_their_devices_do():
    inside = Traffic(kind="all-reduce", axes=(), wire_bytes=1, stride=1, span=8)
    across = Traffic(kind="all-reduce", axes=(), wire_bytes=1, stride=8, span=32)
    for traffic, level in ((inside, "host"), (across, "network")):
        features = Features(num_devices=32, flops={}, traffic=(traffic,))
        assert list(predict(features, GPUS).links_s) == [level]


def test_measured_figures_of_a_host_and_a_file_of_a_network_make_a_machine():
    slow = Machine.from_yaml(
        "nodes:\n- {address: a, chief: true, network_bandwidth: 0.2}\n"
        "- {address: b, network_bandwidth: 0.2}"
    ).with_figures_of(Machine.from_topology("t4:2"))
    found = seconds(slow, {"replica": 2}, ["replica"])
    assert found == {"network": pytest.approx(1 / 0.025)}
