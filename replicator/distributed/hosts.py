"""On which host each process runs: noted once, so that errors can say where to look."""

import socket
from collections.abc import Sequence

from replicator.distributed.coordination import CoordinationClient, process_index

_ROOT = "replicator/hosts/"


def note_host(client: CoordinationClient) -> None:
    """Tell the other processes this one's host name."""
    host = socket.gethostname()
    client.key_value_set(f"{_ROOT}{process_index()}", host, allow_overwrite=True)


def describe_processes(client: CoordinationClient, processes: Sequence[int]) -> str:
    """Name processes by index and, where known, host: "process 1 (on node-b)"."""
    hosts = {
        int(key.rpartition("/")[2]): host
        for key, host in client.key_value_dir_get(_ROOT)
    }
    return ", ".join(
        f"process {p} (on {hosts[p]})" if p in hosts else f"process {p}"
        for p in processes
    )
