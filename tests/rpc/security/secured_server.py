"""A server in a process of its own, for tests that attack it and look at it.

`python -m tests.rpc.security.secured_server ADDRESSES`: the secret is where the
environment says; the address is the line it writes; it ends when its input does.
"""

import logging
import sys

from replicator.rpc.server.server import Server


class Service:
    def echo(self, value):
        return value


def main(addresses):
    logging.basicConfig(level=logging.DEBUG)
    with Server(Service(), address=addresses) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
