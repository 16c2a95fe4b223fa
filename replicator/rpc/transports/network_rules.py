"""Which addresses need TLS; and who has the port that we wanted."""

import contextlib
import functools
import ipaddress
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from replicator.errors import ArgumentError

_logger = logging.getLogger("replicator.rpc")
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def is_loopback(host: str) -> bool:
    """Tell whether only this host can reach, or be reached at, `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_tls(host: str, *, address: str, has_tls: bool, insecure: bool) -> None:
    """Return if it is safe, or was said to be wanted, to use `host`.

    Args:
      host: Where to listen, or to connect to.
      address: The whole of it, for the error.
      has_tls: Whether the connection will be encrypted and both ends proved.
      insecure: Whether the user asked for neither; logged, once for each address.

    Raises:
      ArgumentError: It is beyond loopback, without TLS.
    """
    if has_tls or is_loopback(host):
        return
    if not insecure:
        raise ArgumentError(
            f"`tls` must be given for an address beyond this host, got None for "
            f"{address}. Make certificates with `replicator certificates DIR`, or pass "
            "`insecure=True` if all who can reach the network may read and change "
            "what is sent."
        )
    _say_once(address)


def owner_of_port(port: int) -> int | None:
    """Return the process id of who listens on a TCP port, where we may see it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for descriptor in os.scandir(process / "fd"):
                if os.readlink(descriptor.path) in sockets:
                    return int(process.name)
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # no Linux
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                is_its = int(fields[1].rpartition(":")[2], 16) == port
                if is_its and fields[3] == _LISTENS:
                    yield fields[9]


@functools.cache
def _say_once(address: str) -> None:
    _logger.warning(
        "%s is used without TLS (`insecure=True`): all who can reach the network can "
        "read and change what is sent.",
        address,
    )
