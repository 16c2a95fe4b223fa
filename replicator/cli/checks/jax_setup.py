"""Judge what JAX saw in a fresh process: devices, CPU pool, dispatch, compiled code."""

from replicator.cli.checks.finding import Finding
from replicator.cli.checks.probe import Probe

_SLOW_START_S = 30.0
# Facts: fewer threads than this starve under a few steps of several fake devices.
_SMALLEST_POOL = 16


def check_devices(found: Probe | str, *, accelerators: tuple[str, ...]) -> Finding:
    """Judge whether JAX starts, adds up right, and sees what the machine has.

    Args:
      found: What it saw, or why it did not start.
      accelerators: Kinds of which the machine has device files: "gpu", "tpu".
    """
    name = "devices"
    if isinstance(found, str):
        return Finding(
            name=name,
            status="fail",
            detail=found,
            remedy="Look whether another process holds the devices, and whether "
            "`python -c 'import jax; jax.devices()'` works.",
        )
    seen = f"{found.devices} x {found.kind} ({found.platform})"
    if found.total != found.devices:
        return Finding(
            name=name,
            status="fail",
            detail=f"{seen}; 1 added up over them gave {found.total:g}",
            remedy="Do not train on this machine: its collectives give wrong numbers.",
        )
    detail = f"{seen}, all-reduce right, {found.seconds:.1f} s to start"
    if missing := [kind for kind in accelerators if kind != found.platform]:
        return Finding(
            name=name,
            status="warn",
            detail=f"{detail}; JAX does not use the {missing[0]} that is there",
            remedy=_INSTALL[missing[0]],
        )
    if found.seconds > _SLOW_START_S:
        remedy = "Look what else uses this machine."
        return Finding(name=name, status="warn", detail=detail, remedy=remedy)
    return Finding(name=name, status="ok", detail=detail)


_INSTALL = {
    "gpu": "Run `pip install 'jax[cuda12]'`, or set JAX_PLATFORMS=cpu on purpose.",
    "tpu": "Run `pip install 'jax[tpu]'`, or set JAX_PLATFORMS=cpu on purpose.",
}


def check_cpu_pool(found: Probe) -> Finding:
    """Judge whether XLA's CPU pool can hold the threads of all fake devices."""
    name = "CPU pool"
    if found.platform != "cpu" or found.devices == 1:
        detail = "not needed: no fake devices"
        return Finding(name=name, status="ok", detail=detail)
    wanted = max(_SMALLEST_POOL, 2 * found.devices)
    detail = f"{found.pool} threads for {found.devices} fake devices"
    if found.pool >= wanted:
        return Finding(name=name, status="ok", detail=detail)
    return Finding(
        name=name,
        status="fail",
        detail=f"{detail}: collectives may hang or abort",
        remedy=f"Set REPLICATOR_FAKE_DEVICES={found.devices} instead of JAX's own "
        f"variables, or NPROC={wanted}.",
    )


def check_dispatch(found: Probe, *, several_processes: bool) -> Finding:
    """Judge whether CPU computations may run ahead of the host.

    Args:
      found: What JAX saw.
      several_processes: Whether the environment announces more than one process.
    """
    name = "dispatch"
    if found.platform != "cpu":
        return Finding(name=name, status="ok", detail="asynchronous, on the device")
    if not found.asynchronous:
        return Finding(name=name, status="ok", detail="each CPU step is waited for")
    if several_processes and found.devices > 1:
        return Finding(
            name=name,
            status="warn",
            detail="asynchronous, with several processes of several CPU devices: "
            "they hang with more than one step in flight",
            remedy="Set JAX_CPU_ENABLE_ASYNC_DISPATCH=0.",
        )
    detail = "asynchronous; a Replicator bounds the steps in flight"
    return Finding(name=name, status="ok", detail=detail)


def check_cache(found: Probe, *, write_problem: str, chosen_off: bool) -> Finding:
    """Judge where compiled programs are kept.

    Args:
      found: What JAX was set up with.
      write_problem: Why the directory cannot be written to; empty if it can.
      chosen_off: Whether the user switched it off.
    """
    name = "compilation cache"
    if chosen_off:
        return Finding(name=name, status="ok", detail="switched off by you")
    if found.cache_directory is None:
        return Finding(
            name=name,
            status="warn",
            detail=found.cache_problem or "off",
            remedy="Each run compiles anew until the directory is yours alone: "
            "`chmod 700` it, or set XDG_CACHE_HOME to another place.",
        )
    if write_problem:
        return Finding(
            name=name,
            status="warn",
            detail=f"{found.cache_directory}: {write_problem}",
            remedy="Free space there, or set XDG_CACHE_HOME to another place.",
        )
    return Finding(name=name, status="ok", detail=found.cache_directory)
