"""`replicator devices`: the devices that JAX sees, and the mesh of a `Replicator`."""

import argparse

import jax

from replicator.base.mesh import jax_devices, replica_mesh
from replicator.base.types import Device
from replicator.cli.tables import make_console, print_table
from replicator.engine.replicated import ReplicatedLayout

SUMMARY = "List the devices that JAX sees, and the mesh a Replicator makes of them"
_GIB = 2**30
_TO_TRY = "REPLICATOR_FAKE_DEVICES=8 shows eight fake CPU devices."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""
    parser.epilog = _TO_TRY


def main(arguments: argparse.Namespace) -> int:
    """Print the table."""
    del arguments
    devices = jax_devices()
    header = ("id", "platform", "kind", "process", "memory used", "of")
    print_table(header, [device_row(device) for device in devices])
    lines = mesh_lines(devices)
    if len(devices) == 1 and devices[0].platform == "cpu":
        lines.append(f"to try more: {_TO_TRY}")
    make_console().print(*lines, sep="\n", markup=False, highlight=False)
    return 0


def device_row(device: Device) -> tuple[str, ...]:
    """Return a row of cells that describes a device; memory if the backend reports it.

    >>> device_row(jax.devices("cpu")[0])[1]
    'cpu'
    """
    stats = device.memory_stats() or {}
    return (
        str(device.id),
        device.platform,
        device.device_kind,
        str(device.process_index),
        _gib(stats.get("bytes_in_use")),
        _gib(stats.get("bytes_limit")),
    )


def mesh_lines(devices: list[Device]) -> list[str]:
    """Return lines about the number of processes and the mesh of a `Replicator`.

    >>> mesh_lines(jax.devices()[:2])[1]
    'Replicator(): 2 replicas, mesh (replica=2)'
    """
    layout = ReplicatedLayout(replica_mesh(devices=devices))
    shape = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    count = layout.num_replicas
    mine = sum(device.process_index == jax.process_index() for device in devices)
    processes = jax.process_count()
    return [
        f"processes: {processes}; this is number {jax.process_index()}, with {mine} "
        f"of {len(devices)} devices",
        f"Replicator(): {count} replica{'s' * (count > 1)}, mesh ({shape})",
    ]


def _gib(count_bytes: int | None) -> str:
    return "unknown" if count_bytes is None else f"{count_bytes / _GIB:.1f} GiB"
