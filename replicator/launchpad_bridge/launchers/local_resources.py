"""Share out accelerators and cores of this machine among workers.

Claims of cores and memory are only checked against the machine: many small workers on
few cores are how programs are tried. Accelerators are handed out: each of `gpus=n` is
one worker's alone, in the order of the program. A worker without a claim sees all of
them; then JAX must not take most of a device's memory at its start, as it does by
default.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicator.errors import LaunchError
from replicator.launchpad_bridge.protocols import Executable

ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}
"""glibc keeps large buffers instead of asking the kernel for fresh pages each time.

It doubled what a call of 1 MB achieves (facts: same-host transport).
"""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalMachine:
    """Resources of a machine.

    Attributes:
      gpus: Accelerators, as the names that `CUDA_VISIBLE_DEVICES` takes.
      cores: Numbers of the cores that this process may use.
      memory_bytes: Size of its memory.
    """

    gpus: Sequence[str]
    cores: Sequence[int]
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MachineShare:
    """Resources of one worker.

    Attributes:
      environment: Variables that a backend reads when it starts.
      cores: The only ones it may use; empty for all.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: Sequence[int] = ()


def look_at_machine(environ: Mapping[str, str]) -> LocalMachine:
    """Return the resources of this machine, without starting a backend.

    Args:
      environ: Environment of the launcher: `CUDA_VISIBLE_DEVICES` may leave out some.

    >>> look_at_machine({"CUDA_VISIBLE_DEVICES": "0, 2"}).gpus
    ['0', '2']
    """
    visible = environ.get(_VISIBLE)
    gpus = _gpu_numbers() if visible is None else visible.split(",")
    affinity = getattr(os, "sched_getaffinity", None)
    return LocalMachine(
        gpus=[gpu.strip() for gpu in gpus if gpu.strip()],
        cores=sorted(affinity(0)) if affinity else range(os.cpu_count() or 1),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def share_out(
    executables: Sequence[Executable],
    machine: LocalMachine,
    environ: Mapping[str, str],
    *,
    pin_cores: bool = False,
) -> dict[str, MachineShare]:
    """Return each worker's share, by name.

    Args:
      executables: Workers of the program.
      machine: Resources to share.
      environ: Environment of the launcher; variables that it or a group sets itself
        stay as they are.
      pin_cores: Whether a worker that claims whole cores gets them for itself.

    Raises:
      LaunchError: There is not enough.

    >>> share_out([], LocalMachine(gpus=(), cores=(0,), memory_bytes=1), {})
    {}
    """
    # What is left; each worker takes its part from the front.
    gpus, cores = list(machine.gpus), list(machine.cores)
    shares = {}
    for executable in executables:
        _check_claims(executable, machine)
        environment = _gpu_environment(executable, gpus, len(machine.gpus))
        # Two processes that each preallocate most of a device fail on it together.
        if machine.gpus and _may_share_gpus(executable, executables):
            own = {**environ, **executable.resources.env}
            if _PREALLOCATE not in own and _MEMORY_FRACTION not in own:
                environment[_PREALLOCATE] = "false"
        shares[executable.name] = MachineShare(
            environment=environment,
            cores=_take_cores(executable, cores) if pin_cores else (),
        )
    return shares


def _gpu_numbers() -> list[str]:
    # Device files are there before a driver is loaded in this process: no CUDA starts.
    folder = Path("/dev")
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in folder.glob("nvidia*"))
    return sorted((name[1] for name in names if name), key=int)


def _check_claims(executable: Executable, machine: LocalMachine) -> None:
    resources = executable.resources
    memory_bytes = resources.memory_bytes or 0
    if memory_bytes > machine.memory_bytes:
        there = f"this machine has {machine.memory_bytes}"
        raise _too_much(executable, "memory_bytes", memory_bytes, there)
    if resources.cpus is not None and resources.cpus > len(machine.cores):
        there = f"this machine has {len(machine.cores)} core(s)"
        raise _too_much(executable, "cpus", resources.cpus, there)


def _gpu_environment(
    executable: Executable, left: list[str], in_all: int
) -> dict[str, str]:
    wanted = executable.resources.gpus
    if wanted is None:
        return {}
    if wanted > len(left):
        there = f"{len(left)} of this machine's {in_all} are left"
        raise _too_much(executable, "gpus", wanted, there)
    taken, left[:] = left[:wanted], left[wanted:]
    # An empty list hides all of them; JAX would still try CUDA, and fail.
    environment = {_VISIBLE: ",".join(taken)}
    return environment if wanted else {**environment, "JAX_PLATFORMS": "cpu"}


def _may_share_gpus(executable: Executable, all_of_them: Sequence[Executable]) -> bool:
    sees_all = executable.resources.gpus is None
    others = [each for each in all_of_them if each.resources.gpus != 0]
    return sees_all and len(others) > 1


def _take_cores(executable: Executable, left: list[int]) -> Sequence[int]:
    wanted = executable.resources.cpus
    # Half a core cannot be pinned: such a worker may run on all of them.
    if wanted is None or wanted != int(wanted):
        return ()
    if wanted > len(left):
        there = f"{len(left)} core(s) are left to be pinned to"
        raise _too_much(executable, "cpus", wanted, there)
    taken, left[:] = left[: int(wanted)], left[int(wanted) :]
    return taken


def _too_much(
    executable: Executable, what: str, wanted: float, there: str
) -> LaunchError:
    return LaunchError(
        f"`{what}` of `{executable.label}` must be there for each of its workers, got "
        f"{wanted} for `{executable.name}` and {there}. Ask for less."
    )
