"""`replicator doctor`: one table, exit code 1 on a failure."""

import importlib.metadata
import sys

import pytest

from replicator.cli import doctor
from replicator.cli import main as cli
from replicator.cli.checks import measure
from replicator.cli.checks.judge import Finding
from replicator.cli.checks.measure import CoordinatorFacts
from tests.cli.test_main import run_cli

NOBODY = CoordinatorFacts()
OK = Finding("a", "ok", "fine")
WARN = Finding("b", "warn", "odd", "Look at it.")
FAIL = Finding("c", "fail", "broken", "Mend it.")


@pytest.mark.parametrize(
    ("findings", "code", "told"),
    [
        ([OK, WARN], 0, "2 checks: 0 failed, 1 warned"),
        ([OK, FAIL], 1, "2 checks: 1 failed, 0 warned"),
    ],
)
def test_a_failure_is_exit_code_1(findings, code, told, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "package_findings", list)
    monkeypatch.setattr(doctor, "jax_findings", lambda *_: findings)
    monkeypatch.setattr(doctor, "machine_findings", lambda *_: [])
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert told in out
    assert all(finding.remedy in out for finding in findings)


def test_our_own_metadata_is_what_is_compared():
    names = [finding.name for finding in doctor.package_findings()]
    assert names[:2] == ["Python", "jaxlib"]
    assert {"jax", "optax", "rich", "flax"} <= set(names)
    assert all(finding.status != "fail" for finding in doctor.package_findings())


def test_a_checkout_that_is_not_installed_is_told(monkeypatch):
    def metadata(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "metadata", metadata)
    [finding] = doctor.package_findings()
    assert (finding.status, "pip install" in finding.remedy) == ("warn", True)


def test_machine_findings_are_those_of_the_directory(tmp_path):
    found = {
        finding.name: finding for finding in doctor.machine_findings(tmp_path, NOBODY)
    }
    assert str(tmp_path) in found["disk"].detail
    assert found["ports"].status == "ok"


def test_a_jax_that_does_not_start_in_time_is_a_failure():
    [finding] = doctor.jax_findings(0.01, NOBODY)
    assert finding.status == "fail"
    assert "within 0.01 s" in finding.detail


@pytest.mark.slow
def test_a_jax_that_does_not_start_at_all_is_told_in_its_words(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(RuntimeError, match="nonsense"):
        measure.probe(timeout_s=300.0)


@pytest.mark.slow
def test_a_fresh_process_sees_fake_devices_and_their_pool(monkeypatch):
    monkeypatch.setenv("REPLICATOR_FAKE_DEVICES", "12")
    monkeypatch.setenv("NPROC", "1")
    found = measure.probe(timeout_s=300.0)
    assert (found.platform, found.devices, found.total) == ("cpu", 12, 12.0)
    assert found.pool >= 24


@pytest.mark.slow
def test_the_whole_doctor_runs_here(tmp_path):
    done = run_cli("doctor", "--directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("jax", "devices", "CPU pool", "disk", "ports", "clock"):
        assert f"\n  {check} " in done.stdout
    assert sys.version.split()[0] in done.stdout
