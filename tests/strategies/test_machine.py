"""Machines from files, from devices and from topologies: their levels of links."""

import math

import jax
import pytest

from replicator.errors import ArgumentError
from replicator.strategies.calibration import Calibration, keep_calibration
from replicator.strategies.machine import Machine

GIGABIT = 1e9 / 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "replicator" / "measured"


def cluster(*gpus, head=""):
    rows = [
        f"- {{address: n{n}, gpus: {[*range(count)]}, chief: {n == 0}}}"
        for n, count in enumerate(gpus)
    ]
    return Machine.from_yaml("\n".join([head, "nodes:", *rows]))


def levels(machine):
    return [(link.level, link.devices, link.shared_by) for link in machine.links]


def test_equal_hosts_are_a_level_each():
    assert levels(cluster(4, 4)) == [("host", 4, 1), ("network", 8, 4)]


def test_of_unequal_hosts_only_blocks_that_lie_in_one_are_inside():
    assert levels(cluster(4, 2)) == [("host", 2, 1), ("network", 6, 4)]
    assert levels(cluster(3, 2)) == [("network", 5, 3)]


def test_one_host_has_no_network():
    assert levels(cluster(2)) == [("host", 2, 1)]


def test_the_slowest_network_counts():
    machine = Machine.from_yaml(
        "nodes:\n- {address: a, chief: true, network_bandwidth: 10}\n"
        "- {address: b, network_bandwidth: 2.5}"
    )
    assert machine.links[-1].bytes_per_s == 2.5 * GIGABIT


def test_a_file_without_a_kind_has_no_figures():
    machine = cluster(2, 2)
    assert machine.hardware is None
    assert machine.links[0].bytes_per_s == math.inf


def test_a_file_with_a_kind_has_published_figures():
    machine = cluster(2, 2, head="device: Tesla T4")
    assert machine.hardware.peak("float16") == 65e12
    assert machine.links[0].bytes_per_s == 16e9


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(ArgumentError, match="published figures, got 'abacus'"):
        cluster(2, head="device: abacus")


def test_measured_figures_of_a_host_count_for_a_cluster(own_cache):
    keep_calibration(
        Calibration(
            device_kind=jax.devices()[0].device_kind,
            devices=8,
            flops_per_s={"float32": 3e9},
            memory_bytes_per_s=2e9,
            host_bytes_per_s=1e8,
            host_latency_s=1e-3,
        )
    )
    measured = Machine.from_devices()
    machine = cluster(2, 2).with_figures_of(measured)
    assert machine.hardware.peak("float32") == 3e9
    assert [link.bytes_per_s for link in machine.links] == [1e8, GIGABIT]
    assert [link.latency_s for link in measured.links] == [1e-3]


def test_devices_without_figures_have_none():
    machine = Machine.from_devices()
    assert machine.hardware is None
    assert levels(machine) == [("host", 8, 1)]


class Device:
    def __init__(self, kind, process, **fields):
        self.device_kind, self.process_index = kind, process
        vars(self).update(fields)


def test_gpus_of_two_hosts_are_joined_as_in_the_vendors_systems():
    devices = [Device("NVIDIA H100 80GB HBM3", n // 8) for n in range(16)]
    machine = Machine.from_devices(devices)
    assert levels(machine) == [("host", 8, 1), ("network", 16, 8)]
    assert machine.links[1].bytes_per_s == 400e9


def tpus(*shape, kind="TPU v5 lite", slices=1, cores=1):
    x, y = shape
    return [
        Device(kind, 0, coords=(i, j, 0), core_on_chip=core, slice_index=s)
        for s in range(slices)
        for j in range(y)
        for i in range(x)
        for core in range(cores)
    ]


def test_tpus_form_the_torus_of_their_topology():
    there = Machine.from_devices(tpus(16, 16)).links
    assert there == Machine.from_topology("v5e:16x16").links
    there = Machine.from_devices(tpus(4, 4, kind="TPU v3", cores=2)).links
    assert there == Machine.from_topology("v3:4x4").links


def test_slices_of_tpus_are_joined_by_a_network():
    there = Machine.from_devices(tpus(16, 16, slices=2)).links
    assert there == Machine.from_topology("v5e:16x16", slices=2).links


def test_some_tpus_of_a_torus_are_not_one():
    assert levels(Machine.from_devices(tpus(4, 4)[:7])) == [("host", 7, 1)]


def test_devices_of_two_kinds_are_refused():
    with pytest.raises(ArgumentError, match="of one kind, got A, B"):
        Machine.from_devices([Device("A", 0), Device("B", 0)])


@pytest.mark.parametrize(
    ("topology", "devices", "wraps"),
    [
        ("v5e:16x16", 256, (True, True)),
        ("v5e:8x16", 128, (False, True)),
        ("v5e:4x4", 16, (False, False)),
        ("v5p:4x4x4", 64, (True, True, True)),
        ("v5p:2x4x4", 32, (False, False, False)),
        ("v4:8x8x8", 512, (True, True, True)),
    ],
)
def test_a_torus_is_closed_as_its_generation_has_it(topology, devices, wraps):
    machine = Machine.from_topology(topology)
    assert machine.num_devices == devices
    assert machine.links[-1].wraps == wraps


def test_a_chip_of_two_devices_shares_its_links():
    machine = Machine.from_topology("v3:16x16")
    assert levels(machine) == [("chip", 2, 1), ("torus", 512, 2)]


def test_hosts_of_gpus_are_a_topology():
    assert levels(Machine.from_topology("a100:2x8")) == [
        ("host", 8, 1),
        ("network", 16, 8),
    ]
    assert levels(Machine.from_topology("l4:4")) == [("host", 4, 1)]


@pytest.mark.parametrize("topology", ["h100:1", "v5e:1x1"])
def test_one_device_is_a_topology(topology):
    assert Machine.from_topology(topology).num_devices == 1
    assert Machine.from_topology(topology, slices=2).num_devices == 2


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        ("v9:2x2", "Use one of v2, v3, v4"),
        ("tpu7x:2x2x1", "whose links are published"),
        ("v5e:3x5", "Use one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16."),
        ("v5e:", "a slice of v5e that exists"),
        ("v5p:4x4x6", "AxBxC of multiples of 4, up to 6144 chips"),
        ("v5p:16x16x28", "up to 6144 chips"),
        ("h100:2x9", "at most 8, got 'h100:2x9'"),
        ("h100:x", "Write `h100:8` or `h100:2x8`"),
        ("h100:0x8", "Write `h100:8` or `h100:2x8`"),
        ("l4:2x8", "network has no published figure"),
    ],
)
def test_a_topology_that_does_not_exist_is_refused(topology, names):
    with pytest.raises(ArgumentError) as caught:
        Machine.from_topology(topology)
    assert names in str(caught.value)


def test_slices_without_a_published_network_are_refused():
    with pytest.raises(ArgumentError, match="`slices` must be 1 for v3:4x4"):
        Machine.from_topology("v3:4x4", slices=2)
