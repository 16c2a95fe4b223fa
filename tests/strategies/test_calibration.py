"""Measured speeds are kept for their user, and read only where they are whole."""

import json

import pytest

from replicator.strategies.calibration import (
    Calibration,
    keep_calibration,
    kept_calibration,
)

MEASURED = Calibration(
    device_kind="NVIDIA L4",
    devices=2,
    flops_per_s={"float32": 1e12, "bfloat16": 8e12},
    memory_bytes_per_s=2e11,
    host_bytes_per_s=1e10,
    host_latency_s=2e-5,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_was_kept_is_read_for_the_same_devices_alone():
    assert kept_calibration("NVIDIA L4", 2) is None
    keep_calibration(MEASURED)
    assert kept_calibration("NVIDIA L4", 2) == MEASURED
    assert kept_calibration("NVIDIA L4", 4) is None
    assert kept_calibration("NVIDIA L40S", 2) is None


def test_the_file_lies_in_a_directory_of_its_user_alone():
    file = keep_calibration(MEASURED)
    assert file.name == "nvidia-l4-2.json"
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        {"flops_per_s": {}},
        {"flops_per_s": {"float32": "1e12"}},
        {"memory_bytes_per_s": 0},
        {"host_latency_s": -1},
        {"host_bytes_per_s": True},
        {"more": 1},
    ],
)
def test_a_file_that_holds_something_else_is_not_used(change, caplog):
    file = keep_calibration(MEASURED)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert kept_calibration("NVIDIA L4", 2) is None
    assert "Measure again" in caplog.text


def test_a_damaged_file_is_not_used(caplog):
    keep_calibration(MEASURED).write_text("{")
    assert kept_calibration("NVIDIA L4", 2) is None
    assert "cannot be read" in caplog.text
