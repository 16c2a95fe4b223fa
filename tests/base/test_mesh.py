"""Devices that are not there, and what is no list of devices, are refused."""

import jax
import pytest

from replicator.base.mesh import listed_devices, replica_mesh
from replicator.errors import ArgumentError


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (
            RuntimeError("Unable to initialize backend 'cuda': no GPU (set ...)"),
            "no GPU",
        ),
        (AssertionError(), "JAX has none"),
    ],
)
def test_devices_that_are_not_there_are_one_clear_error(monkeypatch, failure, why):
    def devices():
        raise failure

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ArgumentError, match="`JAX_PLATFORMS` must name") as caught:
        replica_mesh()
    assert f"{why}. Install what they need" in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_platform_is_no_list_of_devices():
    with pytest.raises(ArgumentError, match=r"`jax\.devices\('gpu'\)`"):
        listed_devices("gpu")
