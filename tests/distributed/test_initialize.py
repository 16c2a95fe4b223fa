"""Where process 0 listens, and what it refuses before it does."""

import pytest

from replicator.distributed.clusters import Cluster
from replicator.distributed.initialize import BIND_VARIABLE, _join
from replicator.distributed.processes.ports import free_port
from replicator.errors import ArgumentError, DistributedTimeoutError


def join_as_process_0(port):
    cluster = Cluster(
        kind="arguments",
        coordinator=f"127.0.0.1:{port}",
        num_processes=2,
        process_id=0,
    )
    _join(cluster, timeout_s=0.01, heartbeat_s=100, insecure=False)


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.2"])
def test_process_0_listens_where_the_variable_names_it(monkeypatch, host):
    port = free_port()
    monkeypatch.setenv(BIND_VARIABLE, host)
    with pytest.raises(DistributedTimeoutError) as missed:
        join_as_process_0(port)
    address = f"{host}:{port}" if "::" not in host else f"[::1]:{port}"
    assert f"must come to {address} in time" in str(missed.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_process_0_never_listens_on_all_interfaces(monkeypatch, host):
    monkeypatch.setenv(BIND_VARIABLE, host)
    with pytest.raises(ArgumentError, match="must name one host"):
        join_as_process_0(free_port())
