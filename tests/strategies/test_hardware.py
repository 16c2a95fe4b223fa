"""Peaks of devices, by the names that JAX gives them."""

import pytest

from replicator.strategies.hardware import (
    flops_utilisation,
    hardware_of,
    peak_flops_per_s,
    published,
)


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("TPU v2", 22.5),
        ("TPU v4", 275),
        ("TPU v5", 459),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_accelerators_are_known_by_the_names_that_jax_gives_them(kind, tera):
    assert peak_flops_per_s(kind) == tera * 1e12


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40", "TPU v50", "TPU", ""])
def test_other_devices_are_unknown(kind):
    assert peak_flops_per_s(kind) is None


def test_utilisation_is_the_part_of_all_peaks_that_was_used():
    share = flops_utilisation(
        4e12, steps_per_s=10.0, peak_flops_per_s=100e12, devices=2
    )
    assert share == pytest.approx(0.2)


def test_each_figure_has_a_source():
    assert all(len(entry["source"]) > 20 for entry in published()["device"])


def test_names_of_devices_are_unique():
    names = [entry["name"] for entry in published()["device"]]
    kinds = [kind for entry in published()["device"] for kind in entry["kinds"]]
    assert len(set(names)) == len(names)
    assert len(set(kinds)) == len(kinds)


def test_figures_have_plausible_sizes():
    # A unit that was taken for another one is wrong by 8, or by 1,000.
    for entry in published()["device"]:
        assert 5e12 < min(entry["flops_per_s"].values()) < 1e16
        assert 8e9 <= entry["memory_bytes"] < 1e12
        assert 3e11 <= entry.get("memory_bytes_per_s", 3e11) < 1e13
        links = entry.get("torus", entry.get("host", {"bytes_per_s": 1e10}))
        assert 1e10 <= links["bytes_per_s"] < 1e12
        assert 1e9 <= entry.get("network", links)["bytes_per_s"] <= 1e12


def test_a_pods_all_reduce_is_the_sum_of_its_chips_links():
    # Published apart from the links: 51.2 TB/s, 102.4 TB/s, 1.1 PB/s, 340 TB/s.
    chips = {"v5e": 256, "v6e": 256, "v4": 4096, "v3": 1024}
    whole = {"v5e": 51.2e12, "v6e": 102.4e12, "v4": 1.1e15, "v3": 340e12}
    for entry in published()["device"]:
        if (name := entry["name"]) in chips:
            sent = entry["torus"]["bytes_per_s"] * chips[name]
            assert sent == pytest.approx(whole[name], rel=0.04)


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A100-PCIE-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA H100 NVL", 94),
        ("Tesla V100-SXM2-16GB", 16),
    ],
)
def test_boards_of_one_chip_differ_in_memory(kind, gigabytes):
    assert hardware_of(kind).memory_bytes == gigabytes * 1e9


def test_a_dtype_without_a_figure_has_the_slowest():
    assert hardware_of("Tesla T4").peak("complex64") == 8.1e12
