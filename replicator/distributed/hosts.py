"""Host names of all processes, for error messages.

Each process gets them when the group joins. A group that JAX's own `initialize` made
has no hosts here.
"""

from collections.abc import Sequence

_hosts: list[str] = []  # by process


def note_hosts(hosts: Sequence[str]) -> None:
    """Store the host name of each process."""
    _hosts[:] = hosts


def describe_processes(processes: Sequence[int]) -> str:
    """Name processes by index and, where known, host.

    >>> describe_processes([1, 2])
    'process 1, process 2'
    """
    return ", ".join(
        f"process {p} (on {_hosts[p]})" if p < len(_hosts) else f"process {p}"
        for p in processes
    )
