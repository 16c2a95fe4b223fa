"""What JAX saw is judged by rules that were measured (see the facts they name)."""

import dataclasses

import pytest

from replicator.cli.checks import jax_setup
from replicator.cli.checks.probe import Probe

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


def but(**changes):
    return dataclasses.replace(FAKE, **changes)


@pytest.mark.parametrize(
    ("found", "accelerators", "status"),
    [
        (FAKE, (), "ok"),
        (but(platform="gpu", kind="H200"), ("gpu",), "ok"),
        (FAKE, ("gpu",), "warn"),
        (but(seconds=60.0), (), "warn"),
        (but(total=7.0), (), "fail"),
        ("no answer within 120 s", (), "fail"),
    ],
)
def test_devices(found, accelerators, status):
    finding = jax_setup.check_devices(found, accelerators=accelerators)
    assert finding.status == status
    assert bool(finding.remedy) == (status != "ok")


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
    assert jax_setup.check_cpu_pool(found).status == status


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
    finding = jax_setup.check_dispatch(found, several_processes=several)
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
    finding = jax_setup.check_cache(found, write_problem=write_problem, chosen_off=off)
    assert finding.status == status
