"""The machine is judged by what was measured; a remedy is there where it is not ok."""

import dataclasses

import pytest

from replicator.cli.checks import machine
from replicator.cli.checks.machine import CoordinatorFacts, DiskFacts
from replicator.distributed.clusters import Cluster

GIB = 2**30
DISK = DiskFacts(directory="/runs", free_bytes=100 * GIB, fsync_s=0.01)
NOON = 1_795_000_000.0


def disk(**changes):
    return dataclasses.replace(DISK, **changes)


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (DISK, "ok"),
        (disk(free_bytes=GIB), "warn"),
        (disk(free_bytes=1000), "fail"),
        (disk(fsync_s=3.0), "warn"),
        (disk(problem="Permission denied"), "fail"),
    ],
)
def test_disk(facts, status):
    finding = machine.check_disk(facts)
    assert finding.status == status
    assert bool(finding.remedy) == (status != "ok")


FIRST = Cluster(kind="slurm", coordinator="a:8482", num_processes=4, process_id=0)
THIRD = dataclasses.replace(FIRST, process_id=2)


@pytest.mark.parametrize(
    ("facts", "status", "told"),
    [
        (CoordinatorFacts(), "ok", "one process"),
        (
            CoordinatorFacts(cluster=THIRD),
            "ok",
            "a:8482 (slurm: this is process 2 of 4",
        ),
        (CoordinatorFacts(cluster=THIRD, problem="refused"), "warn", "refused"),
        (CoordinatorFacts(cluster=FIRST, problem="in use"), "warn", "in use"),
        (CoordinatorFacts(malformed="`RANK` must be"), "fail", "`RANK` must be"),
    ],
)
def test_coordinator(facts, status, told):
    finding = machine.check_coordinator(facts)
    assert finding.status == status
    assert told in finding.detail
    assert bool(finding.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("size", "status"), [(None, "warn"), (64 * 2**20, "warn"), (8 * GIB, "ok")]
)
def test_shared_memory(size, status):
    assert machine.check_shared_memory(size).status == status


def test_open_files():
    assert machine.check_open_files(20_000, 20_000).status == "ok"
    low = machine.check_open_files(1024, 1_048_576)
    assert (low.status, "ulimit -n 65536" in low.remedy) == ("warn", True)


def test_loopback():
    assert machine.check_loopback("").status == "ok"
    assert machine.check_loopback("Network is unreachable").status == "fail"


@pytest.mark.parametrize(
    ("now_s", "skew_s", "status"),
    [(NOON, 0.1, "ok"), (NOON, -90.0, "warn"), (0.0, 0.0, "fail")],
)
def test_clock(now_s, skew_s, status):
    finding = machine.check_clock(now_s, installed_s=NOON, disk=disk(skew_s=skew_s))
    assert finding.status == status
