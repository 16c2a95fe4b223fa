"""Find a port of this host that nobody uses, for a group's coordinator."""

import random
import socket

from replicator.errors import DistributedError

# Below those that Linux gives to outgoing connections (32768 to 60999): in the moment
# between this choice and its use, no connection takes it by chance.
_FIRST, _LAST = 20000, 32767
_TRIES = 200


def any_port() -> int:
    """Return a port for a host that cannot be asked which are free.

    >>> 20000 <= any_port() < 32768
    True
    """
    return random.randint(_FIRST, _LAST)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nothing listens.

    Args:
      host: Address that it must be free on.

    Raises:
      DistributedError: None was found.

    >>> 20000 <= free_port() < 32768
    True
    """
    for _ in range(_TRIES):
        port = any_port()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                # Taken again by the group's coordinator in a moment; nothing holds it
                # meanwhile.
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise DistributedError(
        f"`launch` must find a free port on {host}, got none of {_TRIES} between "
        f"{_FIRST} and {_LAST}. End what uses them."
    )
