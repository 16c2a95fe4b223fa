"""Serve an object over rpc, in a process of its own, for the benchmarks that call it.

`python -m benchmarks.rpc.service ADDRESSES POOL_SIZE [MESSAGE_BYTES] [trusted]`; the
address is the line it writes. `trusted`: it trusts what clients can still write.
"""

import ctypes
import gc
import sys
import time

import numpy as np

from benchmarks.rpc.peers import touch_pages
from benchmarks.rpc.processes import wait_until_let_go
from replicator.base.types import PyTree
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.server.server import Server


class Service:
    """Service that the benchmarks call."""

    def noop(self) -> None:
        """Do nothing."""

    def echo(self, value: PyTree) -> PyTree:
        """Return what came."""
        return value

    def push(self, array: np.ndarray) -> None:
        """Take an array, all of it."""
        touch_pages(array)

    def fail(self, text: str) -> None:
        """Raise what any method may.

        Raises:
          ValueError: Always.
        """
        raise ValueError(text)

    def wait(self, seconds: float) -> None:
        """Take so long."""
        time.sleep(seconds)

    def give_back_memory(self) -> None:
        """Free what only cycles of references, or the allocator, keep."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def main(
    addresses: str, pool_size: str, message_bytes: str = "", trusted: str = ""
) -> None:
    limits = MessageLimits(
        message_bytes=int(message_bytes or MessageLimits().message_bytes),
        trusted_memory=bool(trusted),
    )
    server = Server(
        Service(),
        name="service",
        address=addresses,
        pool_size=int(pool_size),
        limits=limits,
    )
    with server:
        print(server.address, flush=True)
        wait_until_let_go()


if __name__ == "__main__":
    main(*sys.argv[1:])
