"""Several PJRT clients of CPU in one process: all that is private of JAX is here.

One client of XLA's CPU runs programs over several devices one after the other; programs
of two clients run beside each other. `jaxlib.xla_client.make_cpu_client` is not public;
jax 0.10 to 0.12 have it, and take the devices of such a client wherever they take their
own.
"""

import functools

from jaxlib import xla_client

from replicator.base.types import Device


# A client lives as long as the process.
@functools.cache
def cpu_client_devices(number: int, num_devices: int) -> tuple[Device, ...]:
    """Return the devices of a CPU client of its own.

    Args:
      number: Which client; the same one for the same arguments.
      num_devices: Number of its devices.

    >>> len(cpu_client_devices(0, 2))
    2
    """
    client = xla_client.make_cpu_client(asynchronous=True, num_devices=num_devices)
    return tuple(client.devices())
