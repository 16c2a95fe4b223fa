"""Devices of TPU topologies that need not be there, for a compiler: libtpu's."""

import contextlib
import glob
import importlib.util
import os
from collections.abc import Iterator

from jax.experimental import topologies

from replicator.base.tracebacks import short_traceback
from replicator.base.types import Device
from replicator.errors import ArgumentError
from replicator.strategies.machine import Machine

# What libtpu asks of a host that has no TPU.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilers at once
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_SKIP_MDS_QUERY": "1",  # nobody answers
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def has_tpu_compiler() -> bool:
    """Return whether libtpu, the compiler for TPUs, is installed."""
    return importlib.util.find_spec("libtpu") is not None


@short_traceback
def devices_of(topology: str) -> list[Device]:
    """Return the devices of a TPU topology, to compile for: they need not be there.

    Pass them to `Replicator(devices=...)`: `rep.inspect` then compiles for them, and
    nothing can run.

    Args:
      topology: A slice by its chips, such as `"v5e:16x16"`.

    Raises:
      ArgumentError: There is no such topology, or it is not of TPUs.
      ImportError: libtpu is not installed.

    >>> devices_of("v5e:5x5")
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `topology` must be a slice of v5e that exists, ...
    """
    machine = Machine.from_topology(topology)
    if not any(link.level in ("chip", "torus") for link in machine.links):
        raise ArgumentError(
            f"`topology` must be of TPUs, got {topology!r}, which no compiler here "
            "knows. Use `strategies.Machine.from_topology` for a forecast."
        )
    if not has_tpu_compiler():
        raise ImportError(
            "`devices_of` must have libtpu, got none installed. Run `pip install "
            "'jax-replicator[tpu]'`."
        )
    with _environment():
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set what libtpu reads when it is loaded, where this host has no TPU."""
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        yield
        return
    added = {name: text for name, text in _NO_TPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
