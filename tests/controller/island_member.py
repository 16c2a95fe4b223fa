"""A process of a user's own group that serves an island, until its input ends."""

import os
import sys

import jax

from replicator import controller


def main(coordinator, number):
    """Join the group, print the address of the island, and wait."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, 2, int(number))
    with controller.IslandServer("unix:") as server:
        print(server.address, flush=True)
        sys.stdin.read()
    os._exit(0)  # without JAX's wait for the other


if __name__ == "__main__":
    main(*sys.argv[1:])
