"""A group of processes as data, and the address that its processes join at.

How it is found in the environment: `launchers/`.
"""

import dataclasses
import re

from replicator.errors import ArgumentError, check_text, check_whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A group of processes, and the number of this one.

    Attributes:
      kind: Source of the group: a name in `DETECTORS`, "arguments" of `initialize`, or
        "jax" for a group that JAX's own `initialize` made.
      coordinator: `host:port` on which process 0 serves the group.
      num_processes: Number of processes in the group.
      process_id: Number of this process, from 0.
      local_devices: Numbers of the host's accelerators for this process; None for all.

    >>> group = Cluster(kind="arguments", coordinator="10.0.0.1:8482",
    ...                 num_processes=4, process_id=2)
    >>> group.host, group.port
    ('10.0.0.1', 8482)
    """

    kind: str
    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_text("coordinator", self.coordinator)
        check_address("coordinator", self.coordinator)
        check_whole("num_processes", self.num_processes)
        check_whole("process_id", self.process_id)
        if self.num_processes < 1:
            raise ArgumentError(
                f"`num_processes` must be at least 1, got {self.num_processes} "
                f"(from {self.kind}). Give the number of processes in the group."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ArgumentError(
                f"`process_id` must be 0 to {self.num_processes - 1}, got "
                f"{self.process_id} (from {self.kind}). Number processes from 0."
            )

    @property
    def host(self) -> str:
        """The host of the coordinator."""
        return split_address(self.coordinator)[0]

    @property
    def port(self) -> int:
        """The port of the coordinator."""
        return split_address(self.coordinator)[1]


def as_environment(cluster: Cluster) -> dict[str, str]:
    """Return the variables by which `detect` finds this group in another process."""
    return {
        "REPLICATOR_COORDINATOR": cluster.coordinator,
        "REPLICATOR_NUM_PROCESSES": str(cluster.num_processes),
        "REPLICATOR_PROCESS_ID": str(cluster.process_id),
    }


def join_address(host: str, port: int) -> str:
    """Write `host:port`; an IPv6 host in brackets.

    >>> join_address("10.0.0.1", 80), join_address("::1", 80)
    ('10.0.0.1:80', '[::1]:80')
    """
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`, or `[IPv6]:port`, into its two parts.

    >>> split_address("[::1]:80")
    ('::1', 80)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_address(name: str, address: str) -> None:
    """Raise unless an address is `host:port` with a host that names one machine.

    Raises:
      ArgumentError: It is not.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})", address)
    if not match or not 0 < int(match[2]) < 65536:
        raise ArgumentError(
            f"`{name}` must be host:port, got {address!r}. Use for example "
            "`10.0.0.1:8482`."
        )
    if not match[1].strip("[]0.:"):
        raise ArgumentError(
            f"`{name}` must name one host, got {address!r}, which is every interface. "
            "Name an address that the other processes reach."
        )
