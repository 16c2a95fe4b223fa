"""Serve what is attacked: `python -m benchmarks.rpc_attack.served ADDRESSES [TLS]`.

The secret is where the environment says; the address is the line it writes; it ends
when its input does.
"""

import enum
import sys

import numpy as np

from replicator.rpc.codec.registry import Registry
from replicator.rpc.security.tls import Tls
from replicator.rpc.server.server import Server

REGISTRY = Registry()
TABLE = 1 << 16


@REGISTRY.register
class Rights(enum.IntFlag):
    """An enum whose members are made as they are asked for."""

    READ = 1
    WRITE = 2


class Service:
    """Methods that the attacker may call, and others that it may not."""

    secret_word = "of an attribute"

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self._table = np.zeros(TABLE)

    @property
    def opened(self) -> str:
        """Record that a property was evaluated."""
        print("a property was evaluated", file=sys.stderr, flush=True)
        return "opened"

    def echo(self, value: object) -> object:
        """Return what came."""
        return value

    def count(self, *args: object) -> int:
        """Return how many arguments came."""
        return len(args)

    def keep(self, array: np.ndarray) -> None:
        """Keep an array as it is."""
        self._kept.append(array)

    def sums_of_kept(self) -> list[float]:
        """Return what is in the kept arrays now; forget them."""
        sums, self._kept = [float(array.sum()) for array in self._kept], []
        return sums

    def put(self, index: np.ndarray) -> None:
        """Write to the places that an array names."""
        self._table[index] = 1.0

    def members(self) -> int:
        """Return how many members the enum has by now."""
        return len(Rights._value2member_map_)

    def _hidden(self) -> str:
        return "hidden"


def main(addresses: str, tls: str = "") -> None:
    files = Tls.in_folder(tls, "server") if tls else None
    server = Server(Service(), address=addresses, registry=REGISTRY, tls=files)
    with server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
