"""Topologies of TPUs that are not there."""

import pytest

from replicator.errors import ArgumentError
from replicator.tuning import topologies


def test_a_topology_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ArgumentError, match=r"got 'v5e:5x5'. Use one of 1x1, 2x2"):
        topologies.devices_of("v5e:5x5")


def test_devices_that_no_compiler_knows_are_refused():
    with pytest.raises(ArgumentError, match="must be of TPUs, got 'h100:2x8'"):
        topologies.devices_of("h100:2x8")


@pytest.mark.skipif(topologies.has_tpu_compiler(), reason="libtpu is installed")
def test_without_a_compiler_the_error_says_how_to_install_it():
    with pytest.raises(ImportError, match=r"pip install 'jax-replicator\[tpu\]'"):
        topologies.devices_of("v5e:2x2")


@pytest.mark.slow
@pytest.mark.skipif(not topologies.has_tpu_compiler(), reason="needs libtpu")
def test_a_topology_has_its_devices():
    assert len(topologies.devices_of("v5e:4x4")) == 16
