"""Peaks of devices, by the names that JAX gives them."""

import pytest

from replicator.monitoring.peak_flops import flops_utilisation, peak_flops_per_s


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
