"""`replicator devices` tells what JAX sees."""

import jax

from replicator.cli import devices
from replicator.cli import main as cli


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
