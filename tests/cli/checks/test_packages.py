"""Versions are compared with what the metadata asks for."""

import pytest

from replicator.cli.checks import packages


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
    assert packages.satisfies(version, limits) is fits


def test_a_requirement_is_split_into_its_parts():
    told = 'tensorboardX>=2.6.4; extra == "tensorboard"'
    assert packages.parse_requirement(told) == (
        "tensorboardX",
        ">=2.6.4",
        "tensorboard",
    )
    assert packages.parse_requirement("rich>=14") == ("rich", ">=14", None)


def test_what_is_old_or_missing_fails_and_says_what_to_run():
    for installed in ({"jax": "0.9.0"}, {}):
        finding = packages.check_package("jax<0.13,>=0.10", installed)
        assert finding.status == "fail"
        assert finding.remedy == "Run `pip install 'jax<0.13,>=0.10'`."


def test_an_optional_package_may_be_missing_but_not_old():
    told = 'flax>=0.12; extra == "nnx"'
    assert packages.check_package(told, {}).status == "ok"
    assert packages.check_package(told, {"flax": "0.11"}).status == "fail"


def test_packages_for_developers_are_not_looked_at():
    assert packages.check_package('ruff>=0.14; extra == "dev"', {}) is None
    for extra in ("experiments", "all"):
        nested = f'jax-replicator[nnx,report]; extra == "{extra}"'
        assert packages.check_package(nested, {}) is None


def test_jaxlib_and_plugins_go_with_jax():
    installed = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1"}
    finding = packages.check_jaxlib("0.10.2", installed)
    assert finding.status == "warn"
    assert finding.remedy == "Run `pip install jax-cuda12-plugin==0.10.2`."
    assert packages.check_jaxlib("0.10.2", {"jaxlib": "0.10.2"}).status == "ok"


def test_an_old_python_fails():
    assert packages.check_python("3.10.1", wanted=">=3.11").status == "fail"
    assert packages.check_python("3.11.0", wanted=">=3.11").status == "ok"
