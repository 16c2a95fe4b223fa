"""`replicator devices`: the devices that JAX sees, and the mesh of a `Replicator`."""

import argparse

import jax

from replicator.base.mesh import jax_devices, replica_mesh
from replicator.base.types import Device
from replicator.cli.checks.speeds import measure_speeds
from replicator.cli.tables import make_console, print_table
from replicator.engine.program_cost import engineering
from replicator.engine.replicated import ReplicatedLayout
from replicator.strategies.calibration import Calibration, keep_calibration

SUMMARY = "List the devices that JAX sees, and the mesh a Replicator makes of them"
_GIB = 2**30
_TO_TRY = "REPLICATOR_FAKE_DEVICES=8 shows eight fake CPU devices."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--calibrate`."""
    parser.epilog = _TO_TRY
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure products, memory and links of this host, and keep the speeds: "
        "predictions of a step's time take them; nothing else should run meanwhile",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the table; with `--calibrate` measure, too.

    Returns:
      1 if what was measured could not be kept.
    """
    devices = jax_devices()
    header = ("id", "platform", "kind", "process", "memory used", "of")
    print_table(header, [device_row(device) for device in devices])
    lines = mesh_lines(devices)
    if len(devices) == 1 and devices[0].platform == "cpu":
        lines.append(f"to try more: {_TO_TRY}")
    kept = True
    if arguments.calibrate:
        measured = measure_speeds(jax.local_devices())
        file = keep_calibration(measured)
        kept = file is not None
        lines += speed_lines(measured)
        lines.append(f"kept in {file}" if kept else "not kept: see the warning above")
    make_console().print(*lines, sep="\n", markup=False, highlight=False)
    return int(not kept)


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


def speed_lines(measured: Calibration) -> list[str]:
    """Return a line for each speed of a calibration.

    >>> peaks = {"float32": 2e12}
    >>> measured = Calibration(
    ...     device_kind="cpu", devices=1, flops_per_s=peaks, memory_bytes_per_s=3e9
    ... )
    >>> speed_lines(measured)
    ['products of float32: 2 TFLOP/s a device', 'memory: 3 GB/s a device']
    """
    lines = [
        f"products of {dtype}: {engineering(speed)}FLOP/s a device"
        for dtype, speed in measured.flops_per_s.items()
    ]
    lines.append(f"memory: {engineering(measured.memory_bytes_per_s)}B/s a device")
    if measured.devices > 1:
        lines.append(
            f"all-reduce of {measured.devices}: "
            f"{engineering(measured.host_bytes_per_s)}B/s sent by a device, "
            f"{measured.host_latency_s * 1e6:.3g} us a hop"
        )
    return lines


def _gib(count_bytes: int | None) -> str:
    return "unknown" if count_bytes is None else f"{count_bytes / _GIB:.1f} GiB"
