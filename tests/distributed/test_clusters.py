"""A group as data, and the address that its processes meet at."""

import pytest

from replicator.distributed.clusters import (
    Cluster,
    check_address,
    join_address,
    split_address,
)
from replicator.errors import ArgumentError


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:65535", "[fe80::1]:8482"])
def test_addresses_are_taken_apart_and_put_together(address):
    check_address("coordinator", address)
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize("address", ["a", "a:", "a:0", "a:65536", "a b:1", ":1", "::1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ArgumentError, match="must be host:port"):
        check_address("coordinator", address)


def test_a_cluster_of_no_process_is_refused():
    with pytest.raises(ArgumentError, match="`num_processes` must be at least 1"):
        Cluster(kind="arguments", coordinator="a:1", num_processes=0, process_id=0)
