"""`replicator devices` tells what JAX sees."""

import jax

from replicator.cli import main as cli
from replicator.cli.checks.speeds import measure_speeds
from replicator.cli.look import devices
from replicator.strategies.machine import Machine


def test_all_devices_and_the_mesh_are_told(capsys):
    assert cli.main(["devices"]) == 0
    told = capsys.readouterr().out
    assert told.count(" cpu ") == 16  # platform and kind of eight
    assert "processes: 1; this is number 0, with 8 of 8 devices" in told
    assert "Replicator(): 8 replicas, mesh (replica=8)" in told


class Accelerator:
    id, platform, device_kind, process_index = 3, "gpu", "H200", 1

    def memory_stats(self):
        return {"bytes_in_use": 3 * 2**30, "bytes_limit": 139 * 2**30}


def test_memory_is_told_where_the_device_tells_it():
    row = devices.device_row(Accelerator())
    assert row == ("3", "gpu", "H200", "1", "3.0 GiB", "139.0 GiB")


def test_one_replica_is_no_plural():
    assert devices.mesh_lines(jax.devices()[:1])[1].startswith(
        "Replicator(): 1 replica,"
    )


def test_memory_is_unknown_on_a_cpu():
    assert devices.device_row(jax.devices()[0])[-2:] == ("unknown", "unknown")


def test_measured_speeds_are_kept_for_these_devices(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        devices,
        "measure_speeds",
        lambda found: measure_speeds(found[:2], edge=16, sizes=(2**10, 2**12)),
    )
    assert cli.main(["devices", "--calibrate"]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert "productsoffloat32:" in out
    assert str(tmp_path / "replicator" / "measured" / "cpu-2.json") in out
    machine = Machine.from_devices(jax.devices()[:2])
    assert machine.hardware.peak("float32") > 0
    assert 0 < machine.links[0].bytes_per_s < float("inf")


def test_speeds_that_cannot_be_kept_end_with_an_error(capsys, monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "replicator").mkdir(mode=0o777)
    (tmp_path / "replicator").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = Machine.from_topology("t4:1").hardware
    measured = devices.Calibration(
        device_kind="cpu", devices=1, flops_per_s=one.flops_per_s, memory_bytes_per_s=1
    )
    monkeypatch.setattr(devices, "measure_speeds", lambda found: measured)
    assert cli.main(["devices", "--calibrate"]) == 1
    assert "not kept" in capsys.readouterr().out
