"""On which host each process runs, so that errors can say where to look.

The rendezvous tells every process. A group that met otherwise, by JAX's own
`initialize`, has no hosts here.
"""

from collections.abc import Sequence

_hosts: list[str] = []  # by process


def note_hosts(hosts: Sequence[str]) -> None:
    """Remember the host name of each process."""
    _hosts[:] = hosts


def describe_processes(processes: Sequence[int]) -> str:
    """Name processes by index and, where known, host: "process 1 (on node-b)"."""
    return ", ".join(
        f"process {p} (on {_hosts[p]})" if p < len(_hosts) else f"process {p}"
        for p in processes
    )
