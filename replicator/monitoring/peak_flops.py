"""Peak speed of accelerators, and the share of it that a run used.

Dense bfloat16 peaks from the vendors' data sheets (float16 where there is no bfloat16),
for each device in JAX: a core of TPU v2, v3 and 7x, of which a chip has two, a
chip of all others.
"""

_TERA = 10**12
# By beginning of `device.device_kind`, in lower case; the longest match counts.
_PEAKS = {
    "tpu v2": 22.5,
    "tpu v3": 61.5,
    "tpu v4": 275.0,
    "tpu v5": 459.0,
    "tpu v5p": 459.0,
    "tpu v5e": 197.0,
    "tpu v5 lite": 197.0,
    "tpu v6e": 918.0,
    "tpu v6 lite": 918.0,
    "tpu7x": 1153.5,
    "tesla v100": 125.0,
    "tesla t4": 65.0,
    "nvidia a100": 312.0,
    "nvidia l4": 121.0,
    "nvidia l40s": 362.0,
    "nvidia h100": 989.0,
    "nvidia h100 pcie": 756.0,
    "nvidia h100 nvl": 835.0,
    "nvidia h200": 989.0,
    "nvidia gh200": 989.0,
    "nvidia b200": 2250.0,
}


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the peak floating-point operations per second of a device.

    Args:
      device_kind: As in `jax.Device.device_kind`.

    Returns:
      None for a kind that is not known here, such as a CPU.

    >>> peak_flops_per_s("NVIDIA H100 80GB HBM3"), peak_flops_per_s("cpu")
    (989000000000000.0, None)
    """
    kind = device_kind.lower().replace("-", " ") + " "  # "a100-sxm4", "l40 "
    fitting = [name for name in _PEAKS if kind.startswith(f"{name} ")]
    return _PEAKS[max(fitting, key=len)] * _TERA if fitting else None


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
