"""Published figures of accelerators, and the share of a peak that a run used.

The figures are data, each with its source: `hardware.toml`, beside this file.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Figures of one device of JAX, published or measured.

    Attributes:
      name: Name of the device, as in a topology: `"v5e"`, `"h100"`.
      flops_per_s: Peak of dense products, by the dtype of their operands.
      memory_bytes: Size of its memory; None if it is not known.
      memory_bytes_per_s: Bytes a second from and to its memory; None likewise.
      source: Source of the figures.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Return the peak for a dtype; for one without a figure the slowest.

        >>> hardware_of("TPU v5 lite").peak("int8")
        393000000000000.0
        """
        return self.flops_per_s.get(dtype) or min(self.flops_per_s.values())


def hardware_of(device_kind: str) -> Hardware | None:
    """Return the published figures of a device; None for a kind that is not known.

    Args:
      device_kind: As in `jax.Device.device_kind`.

    >>> hardware_of("NVIDIA H100 80GB HBM3").memory_bytes
    80000000000.0
    """
    entry = entry_of(device_kind)
    return None if entry is None else hardware_from(entry)


def hardware_from(entry: Mapping[str, Any]) -> Hardware:
    """Return the figures of an entry of the file."""
    return Hardware(
        name=entry["name"],
        flops_per_s=entry["flops_per_s"],
        memory_bytes=entry["memory_bytes"],
        memory_bytes_per_s=entry.get("memory_bytes_per_s"),
        source=entry["source"],
    )


def entry_of(device_kind: str) -> Mapping[str, Any] | None:
    """Return the entry of the file for a kind of device; None if there is none."""
    kind = device_kind.lower().replace("-", " ") + " "  # "a100-sxm4", "l40 "
    fitting = [
        (len(beginning), entry)
        for entry in published()["device"]
        for beginning in entry["kinds"]
        if kind.startswith(f"{beginning} ")
    ]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None


@functools.cache
def published() -> Mapping[str, Any]:
    """Return the file of figures, parsed; its head describes the fields."""
    file = resources.files("replicator.strategies") / "hardware.toml"
    return tomllib.loads(file.read_text("utf-8"))


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the peak floating-point operations per second of a device.

    It is that of bfloat16, or of float16 where there is no bfloat16.

    Args:
      device_kind: As in `jax.Device.device_kind`.

    Returns:
      None for a kind that is not known here, such as a CPU.

    >>> peak_flops_per_s("NVIDIA H100 80GB HBM3"), peak_flops_per_s("cpu")
    (989000000000000.0, None)
    """
    if (hardware := hardware_of(device_kind)) is None:
        return None
    peaks = hardware.flops_per_s
    return peaks.get("bfloat16") or peaks["float16"]


def flops_utilisation(
    flops_per_step: float, *, steps_per_s: float, peak_flops_per_s: float, devices: int
) -> float:
    """Return the share of the devices' peak that training used, 0 to 1.

    With the operations of the model as `flops_per_step` this is the model-flops
    utilisation of PaLM (Chowdhery et al. 2022, appendix B).

    Args:
      flops_per_step: Operations on all devices together.
      steps_per_s: Measured rate, with waits for input and all else.
      peak_flops_per_s: Peak of one device.
      devices: Number of devices.

    >>> flops_utilisation(1e12, steps_per_s=50, peak_flops_per_s=1e14, devices=2)
    0.25
    """
    return flops_per_step * steps_per_s / (peak_flops_per_s * devices)
