"""What was measured is judged by rules; a remedy is there where it is not ok."""

import dataclasses

import pytest

from replicator.cli.checks import judge
from replicator.cli.checks.measure import CoordinatorFacts, DiskFacts, Probe
from replicator.distributed.clusters import Cluster

FAKE = Probe(
    platform="cpu",
    kind="cpu",
    devices=8,
    pool=16,
    asynchronous=True,
    total=8.0,
    seconds=0.4,
    cache_directory="~/.cache/replicator/xla",
    cache_problem="",
)


GIB = 2**30
DISK = DiskFacts(directory="/runs", free_bytes=100 * GIB, fsync_s=0.01)
NOON = 1_795_000_000.0


def but(**changes):
    return dataclasses.replace(FAKE, **changes)


@pytest.mark.parametrize(
    ("found", "accelerators", "status"),
    [
        (FAKE, (), "ok"),
        (but(platform="gpu", kind="H200"), ("cuda12",), "ok"),
        (FAKE, ("cuda13",), "warn"),
        (FAKE, ("rocm",), "warn"),
        (FAKE, ("tpu",), "warn"),
        (but(seconds=60.0), (), "warn"),
        (but(total=7.0), (), "fail"),
        ("no answer within 120 s", (), "fail"),
    ],
)
def test_devices(found, accelerators, status):
    finding = judge.check_devices(found, accelerators=accelerators)
    assert finding.status == status
    assert bool(finding.remedy) == (status != "ok")


def test_the_extra_of_a_missing_plugin_is_named():
    finding = judge.check_devices(FAKE, accelerators=("cuda13",))
    assert "its plugin `jax-cuda13-plugin` is not installed" in finding.detail
    assert "pip install 'jax-replicator[cuda13]'" in finding.remedy


def test_a_plugin_that_is_there_and_not_used_is_looked_at():
    installed = {"libtpu": "0.1"}
    finding = judge.check_devices(FAKE, accelerators=("tpu",), installed=installed)
    assert "JAX_PLATFORMS=tpu python -c" in finding.remedy


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (FAKE, "ok"),
        (but(pool=8), "fail"),
        (but(pool=16, devices=16), "fail"),
        (but(pool=2, devices=1), "ok"),
        (but(pool=2, platform="tpu"), "ok"),
    ],
)
def test_the_cpu_pool_holds_two_threads_a_device(found, status):
    assert judge.check_cpu_pool(found).status == status


@pytest.mark.parametrize(
    ("found", "several", "status"),
    [
        (FAKE, False, "ok"),
        (FAKE, True, "warn"),
        (but(asynchronous=False), True, "ok"),
        (but(devices=1), True, "ok"),
        (but(platform="gpu"), True, "ok"),
    ],
)
def test_dispatch_is_synchronous_where_processes_have_several_cpu_devices(
    found, several, status
):
    finding = judge.check_dispatch(found, several_processes=several)
    assert finding.status == status


@pytest.mark.parametrize(
    ("found", "write_problem", "off", "status"),
    [
        (FAKE, "", False, "ok"),
        (FAKE, "No space left on device", False, "warn"),
        (but(cache_directory=None, cache_problem="mode 777"), "", False, "warn"),
        (but(cache_directory=None), "", True, "ok"),
    ],
)
def test_the_cache_is_private_and_writable(found, write_problem, off, status):
    finding = judge.check_cache(found, write_problem=write_problem, chosen_off=off)
    assert finding.status == status


@pytest.mark.parametrize(
    ("version", "limits", "fits"),
    [
        ("0.10.2", "<0.13,>=0.10", True),
        ("0.9.9", ">=0.10", False),
        ("0.13", "<0.13", False),
        ("0.12.99", "<0.13", True),
        ("2.0.0", ">=2", True),
        ("1!2", "", True),
        ("3.12.0rc1", ">=3.11", True),
    ],
)
def test_versions_compare_as_numbers(version, limits, fits):
    finding = judge.check_python(version, wanted=limits)
    assert (finding.status == "ok") is fits


def test_what_is_old_or_missing_fails_and_says_what_to_run():
    for installed in ({"jax": "0.9.0"}, {}):
        finding = judge.check_package("jax<0.13,>=0.10", installed)
        assert finding.status == "fail"
        assert finding.remedy == "Run `pip install 'jax<0.13,>=0.10'`."


def test_an_optional_package_may_be_missing_but_not_old():
    told = 'flax>=0.12; extra == "nnx"'
    assert judge.check_package(told, {}).status == "ok"
    assert judge.check_package(told, {"flax": "0.11"}).status == "fail"


def test_packages_for_developers_are_not_looked_at():
    assert judge.check_package('ruff>=0.14; extra == "dev"', {}) is None
    for extra in ("experiments", "all"):
        nested = f'jax-replicator[nnx,report]; extra == "{extra}"'
        assert judge.check_package(nested, {}) is None


def test_jaxlib_and_plugins_go_with_jax():
    installed = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1"}
    finding = judge.check_jaxlib("0.10.2", installed)
    assert finding.status == "warn"
    assert finding.remedy == "Run `pip install jax-cuda12-plugin==0.10.2`."
    assert judge.check_jaxlib("0.10.2", {"jaxlib": "0.10.2"}).status == "ok"


def test_an_old_python_fails():
    assert judge.check_python("3.10.1", wanted=">=3.11").status == "fail"
    assert judge.check_python("3.11.0", wanted=">=3.11").status == "ok"


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
    finding = judge.check_disk(facts)
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
    finding = judge.check_coordinator(facts)
    assert finding.status == status
    assert told in finding.detail
    assert bool(finding.remedy) == (status != "ok")


def test_launchers_are_a_line_each():
    facts = CoordinatorFacts(launchers=("slurm: one process", "not set: tpu"))
    assert judge.check_launchers(facts).detail == "slurm: one process\nnot set: tpu"


@pytest.mark.parametrize(
    ("size", "status"), [(None, "warn"), (64 * 2**20, "warn"), (8 * GIB, "ok")]
)
def test_shared_memory(size, status):
    assert judge.check_shared_memory(size).status == status


def test_open_files():
    assert judge.check_open_files(20_000, 20_000).status == "ok"
    low = judge.check_open_files(1024, 1_048_576)
    assert (low.status, "ulimit -n 65536" in low.remedy) == ("warn", True)


def test_loopback():
    assert judge.check_loopback("").status == "ok"
    assert judge.check_loopback("Network is unreachable").status == "fail"


@pytest.mark.parametrize(
    ("now_s", "skew_s", "status"),
    [(NOON, 0.1, "ok"), (NOON, -90.0, "warn"), (0.0, 0.0, "fail")],
)
def test_clock(now_s, skew_s, status):
    finding = judge.check_clock(now_s, installed_s=NOON, disk=disk(skew_s=skew_s))
    assert finding.status == status
