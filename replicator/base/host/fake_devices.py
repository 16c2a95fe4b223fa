"""Fake CPU devices: their number, and a thread pool that cannot starve.

XLA's CPU client has one pool; each collective in flight parks a thread of it per
device. With as many threads as cores, a few steps of eight devices on two cores fill
it, and XLA aborts the process after 40 s. `NPROC` sizes the pool; XLA reads it when the
client starts. Bounded run-ahead (`run_ahead.py`) is needed as well.
"""

import os
import re

import jax

from replicator.base.tracebacks import short_traceback
from replicator.errors import ArgumentError, TooLateError, check_count

ENVIRONMENT_VARIABLE = "REPLICATOR_FAKE_DEVICES"
_SMALLEST_POOL = 16


@short_traceback
def fake_devices(count: int) -> None:
    """Make JAX see `count` CPU devices on this machine, for tests and first tries.

    Call it before JAX starts, that is before the first array or `jax.devices()`; or set
    `REPLICATOR_FAKE_DEVICES` in the environment. Calling it again with the same count
    does nothing.

    Args:
      count: Number of devices, at least 1.

    Raises:
      ArgumentError: `count` is not a whole number of at least 1.
      TooLateError: JAX already started with other devices.

    >>> replicator.fake_devices(8)
    """
    check_count("count", count, "Use 8 to try data parallelism.")
    size_cpu_pool(count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        _check_started(count)


def size_cpu_pool(devices: int) -> None:
    """Give XLA's CPU pool two threads per device; no effect once JAX started.

    One device needs none of it, and pays for it: with more threads than cores, small
    matrix products take up to twice as long.
    """
    if devices < 2:
        return
    wanted = max(_SMALLEST_POOL, 2 * devices)
    if int(os.environ.get("NPROC") or 0) < wanted:
        os.environ["NPROC"] = str(wanted)


def obey_environment() -> None:
    """Call `fake_devices` if `REPLICATOR_FAKE_DEVICES` is set.

    XLA's own flag for fake devices is left to XLA; only its pool is sized.

    Raises:
      ArgumentError: The variable is not a positive number.
      TooLateError: JAX already started with other devices.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE)
    if not asked:
        size_cpu_pool(_devices_of_xla_flags())
        return
    if not asked.isdecimal() or int(asked) < 1:
        raise ArgumentError(
            f"`{ENVIRONMENT_VARIABLE}` must be a positive number, got {asked!r}. Set "
            "it to 8, or unset it."
        )
    fake_devices(int(asked))


def asked_cpu_devices() -> int:
    """Return how many CPU devices were asked for, by JAX's own ways, too; else < 1."""
    asked = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    return max(asked, _devices_of_xla_flags())


def _devices_of_xla_flags() -> int:
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(found[-1]) if found else 0


def _check_started(count: int) -> None:
    found = jax.devices()
    if len(found) != count or found[0].platform != "cpu":
        raise TooLateError(
            f"`fake_devices` must be called before JAX starts, got {count} when JAX "
            f"already runs {len(found)} {found[0].platform} device(s). Call it (or "
            f"set {ENVIRONMENT_VARIABLE}={count}) before the first array or "
            "`jax.devices()`; in a notebook, restart the kernel."
        )
