"""What is measured is measured on this machine, and never raises."""

import os
import socket

import pytest

from replicator.cli.checks import measure


def test_a_directory_that_can_be_written_to(tmp_path):
    found = measure.disk_facts(tmp_path)
    assert found.problem == ""
    assert found.free_bytes > 0
    assert abs(found.skew_s) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_yet(tmp_path):
    assert measure.disk_facts(tmp_path / "new" / "run").problem == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    assert measure.disk_facts(tmp_path / "file").problem == "Not a directory"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert measure.write_problem(str(tmp_path)) == "Permission denied"


def test_loopback_works_here():
    assert measure.loopback_problem() == ""


@pytest.fixture
def group(monkeypatch):
    """Announce a group of two processes, of which this is one."""

    def announce(process_id, address):
        monkeypatch.setenv("REPLICATOR_COORDINATOR", address)
        monkeypatch.setenv("REPLICATOR_NUM_PROCESSES", "2")
        monkeypatch.setenv("REPLICATOR_PROCESS_ID", str(process_id))
        return measure.coordinator_facts()

    return announce


def test_a_coordinator_is_knocked_at(group):
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = group(1, f"127.0.0.1:{server.getsockname()[1]}")
    assert (found.problem, found.several_processes) == ("", True)


def test_a_port_that_another_has_is_told_to_both_sides(group):
    with socket.socket() as deaf:  # it has the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        assert group(0, address).problem.startswith("Address already in use")
        assert group(1, address).problem == "Connection refused"


def test_variables_that_make_no_sense_are_told(group):
    assert "must" in group(1, "nowhere").malformed
    assert "`REPLICATOR_PROCESS_ID`" in group(7, "127.0.0.1:1").malformed


def test_each_launcher_is_told_of(group):
    found, others = group(0, "nowhere").launchers
    assert found.startswith("replicator: process 0 of 2 at nowhere ")
    assert "slurm (SLURM_STEP_NUM_TASKS or SLURM_NTASKS)" in others


def test_accelerators_are_not_missed_by_who_chose_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert measure.accelerators() == ()


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue", "cuda12"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06",
            "cuda13",
        ),
        ("", "cuda12"),
    ],
)
def test_the_driver_decides_which_cuda_it_is(driver, extra):
    assert measure.cuda_extra(driver) == extra


def test_versions_are_by_lower_case_name():
    installed = measure.installed_versions()
    assert {"jax", "numpy", "jax-replicator"} <= set(installed)
