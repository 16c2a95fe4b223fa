"""Judge an installation: each check is a function of what `measure` found."""

import dataclasses
import datetime
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from replicator.cli.checks.measure import CoordinatorFacts, DiskFacts, Probe

Status: TypeAlias = Literal["ok", "warn", "fail"]

_GIB, _MIB = 2**30, 2**20
_SLOW_START_S = 30.0
# With fewer threads a few steps of several fake devices starve.
_SMALLEST_POOL = 16
_LITTLE_DISK, _NO_DISK = 10 * _GIB, 100 * _MIB
_SLOW_FSYNC_S = 1.0
_LITTLE_SHARED_MEMORY = 256 * _MIB
_FEW_FILES = 4096
_CLOCK_SKEW_S = 5.0
_A_DAY_S = 86400.0
# Extras for those who work on the package itself, and the sum of the others.
_OF_NO_RUN = frozenset({"all", "experiments", "test", "dev"})


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
      name: Name of the check.
      status: `fail` if runs will not work, `warn` if some will not.
      detail: Result of the check.
      remedy: A sentence to the user; empty if the status is `ok`.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def check_python(found: str, *, wanted: str) -> Finding:
    """Compare Python's version with `wanted`, such as `>=3.11`.

    >>> check_python("3.10.2", wanted=">=3.11").status
    'fail'
    """
    if _satisfies(found, SpecifierSet(wanted)):
        return Finding("Python", "ok", found)
    remedy = "Make a virtual environment with a newer Python."
    return Finding("Python", "fail", f"{found}, needs {wanted}", remedy)


def check_package(line: str, installed: Mapping[str, str]) -> Finding | None:
    """Compare one requirement with what is installed.

    Args:
      line: As in a wheel's metadata: `flax>=0.12; extra == "nnx"`.
      installed: Versions by lower-case name.

    Returns:
      The finding; None for a requirement that no run has.

    >>> check_package("optax>=0.2", {"optax": "0.1.9"}).remedy
    "Run `pip install 'optax>=0.2'`."
    """
    wanted = Requirement(line)
    extra = re.search(r"extra == [\"']([^\"']+)[\"']", str(wanted.marker))
    if extra and extra[1] in _OF_NO_RUN:
        return None
    name, limits = wanted.name, wanted.specifier
    found = installed.get(name.lower())
    if found is None and extra:
        detail = f"not installed (it is optional: extra `{extra[1]}`)"
        return Finding(name, "ok", detail)
    if found is not None and _satisfies(found, limits):
        return Finding(name, "ok", found)
    detail = f"{found or 'not installed'}, needs {limits}"
    return Finding(name, "fail", detail, f"Run `pip install '{name}{limits}'`.")


def check_jaxlib(jax: str, installed: Mapping[str, str]) -> Finding:
    """Compare the versions of jaxlib and of accelerator plugins with that of jax.

    >>> check_jaxlib("0.10.2", {"jaxlib": "0.10.1"}).remedy
    'Run `pip install jaxlib==0.10.2`.'
    """
    parts = {
        name: version
        for name, version in sorted(installed.items())
        if name == "jaxlib" or re.fullmatch(r"jax-(cuda|rocm)\d+-(plugin|pjrt)", name)
    }
    odd = [name for name, version in parts.items() if version != jax]
    detail = ", ".join(f"{name} {version}" for name, version in parts.items())
    if not odd:
        return Finding("jaxlib", "ok", detail)
    remedy = f"Run `pip install {' '.join(f'{name}=={jax}' for name in odd)}`."
    return Finding("jaxlib", "warn", f"{detail}; jax is {jax}", remedy)


def check_devices(
    found: Probe | str,
    *,
    accelerators: tuple[str, ...],
    installed: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    """Judge whether JAX starts, adds correctly, and uses the machine's accelerators.

    Args:
      found: Result of the probe, or why JAX did not start.
      accelerators: Extras of JAX for accelerators of which the machine has device
        files: "cuda12", "cuda13", "rocm", "tpu".
      installed: Versions by lower-case name.

    >>> check_devices("no answer from JAX", accelerators=()).status
    'fail'
    """
    if isinstance(found, str):
        remedy = (
            "Look whether another process holds the devices, and whether "
            "`python -c 'import jax; jax.devices()'` works."
        )
        return Finding("devices", "fail", found, remedy)
    seen = f"{found.devices} x {found.kind} ({found.platform})"
    if found.total != found.devices:
        detail = f"{seen}; 1 added up over them gave {found.total:g}"
        remedy = "Do not train on this machine: its collectives give wrong numbers."
        return Finding("devices", "fail", detail, remedy)
    detail = f"{seen}, all-reduce right, {found.seconds:.1f} s to start"
    for extra in accelerators:
        platform, plugin = _PLUGINS[extra]
        if platform == found.platform:
            continue
        detail += f"; JAX does not use the {platform} that is there"
        if plugin in installed:
            command = f"JAX_PLATFORMS={platform} python -c 'import jax; jax.devices()'"
            remedy = f"Look why: `{command}`."
            return Finding("devices", "warn", detail, remedy)
        detail += f": its plugin `{plugin}` is not installed"
        return Finding("devices", "warn", detail, _install(extra))
    if found.seconds > _SLOW_START_S:
        return Finding("devices", "warn", detail, "Look what else uses this machine.")
    return Finding("devices", "ok", detail)


# Platform, and distribution of the plugin, by JAX's extra.
_PLUGINS = {
    "cuda12": ("gpu", "jax-cuda12-plugin"),
    "cuda13": ("gpu", "jax-cuda13-plugin"),
    "rocm": ("gpu", "jax-rocm7-plugin"),
    "tpu": ("tpu", "libtpu"),
}


def _install(extra: str) -> str:
    # JAX has no wheels of its own for ROCm, so we have no extra for it.
    package = f"'jax-replicator[{extra}]'" if extra != "rocm" else "jax-rocm7-plugin"
    return f"Run `pip install {package}`, or set JAX_PLATFORMS=cpu on purpose."


def check_cpu_pool(found: Probe) -> Finding:
    """Judge whether XLA's CPU pool can hold the threads of all fake devices."""
    if found.platform != "cpu" or found.devices == 1:
        return Finding("CPU pool", "ok", "not needed: no fake devices")
    wanted = max(_SMALLEST_POOL, 2 * found.devices)
    detail = f"{found.pool} threads for {found.devices} fake devices"
    if found.pool >= wanted:
        return Finding("CPU pool", "ok", detail)
    remedy = (
        f"Set REPLICATOR_FAKE_DEVICES={found.devices} instead of JAX's own variables, "
        f"or NPROC={wanted}."
    )
    detail += ": collectives may hang or abort"
    return Finding("CPU pool", "fail", detail, remedy)


def check_dispatch(found: Probe, *, several_processes: bool) -> Finding:
    """Judge whether CPU computations may run ahead of the host.

    Args:
      found: Result of the probe.
      several_processes: Whether the environment announces more than one process.
    """
    if found.platform != "cpu":
        return Finding("dispatch", "ok", "asynchronous, on the device")
    if not found.asynchronous:
        return Finding("dispatch", "ok", "each CPU step is waited for")
    if several_processes and found.devices > 1:
        detail = (
            "asynchronous, with several processes of several CPU devices: they hang "
            "with more than one step in flight"
        )
        remedy = "Set JAX_CPU_ENABLE_ASYNC_DISPATCH=0."
        return Finding("dispatch", "warn", detail, remedy)
    detail = "asynchronous; a Replicator bounds the steps in flight"
    return Finding("dispatch", "ok", detail)


def check_cache(found: Probe, *, write_problem: str, chosen_off: bool) -> Finding:
    """Judge where compiled programs are kept.

    Args:
      found: Result of the probe.
      write_problem: Why the directory cannot be written to; empty if it can.
      chosen_off: Whether the user switched it off.
    """
    name = "compilation cache"
    if chosen_off:
        return Finding(name, "ok", "switched off by you")
    if found.cache_directory is None:
        remedy = (
            "Each run compiles anew until only you can write to the directory: "
            "`chmod 700` it, or set XDG_CACHE_HOME to another one."
        )
        return Finding(name, "warn", found.cache_problem or "off", remedy)
    if write_problem:
        detail = f"{found.cache_directory}: {write_problem}"
        remedy = "Free space there, or set XDG_CACHE_HOME to another directory."
        return Finding(name, "warn", detail, remedy)
    return Finding(name, "ok", found.cache_directory)


def check_disk(facts: DiskFacts) -> Finding:
    """Judge whether checkpoints and metrics can go to a directory."""
    if facts.problem:
        detail = f"{facts.directory}: {facts.problem}"
        remedy = "Name a directory that you may write to: `--directory`."
        return Finding("disk", "fail", detail, remedy)
    free = f"{facts.free_bytes / _GIB:.1f} GiB free"
    detail = f"{facts.directory}: {free}, fsync {1000 * facts.fsync_s:.0f} ms"
    if facts.free_bytes < _LITTLE_DISK:
        status = "fail" if facts.free_bytes < _NO_DISK else "warn"
        remedy = "Free space, or save elsewhere; a full disk loses checkpoints."
        return Finding("disk", status, detail, remedy)
    if facts.fsync_s > _SLOW_FSYNC_S:
        return Finding("disk", "warn", detail, "Save to a faster disk, or less often.")
    return Finding("disk", "ok", detail)


def check_loopback(problem: str) -> Finding:
    """Judge whether processes of this machine can connect to each other.

    Args:
      problem: Why a connection to 127.0.0.1 failed; empty if it did not.

    >>> check_loopback("").detail
    '127.0.0.1 binds and connects'
    """
    if not problem:
        return Finding("ports", "ok", "127.0.0.1 binds and connects")
    remedy = "Bring the loopback interface up: `ip link set lo up`."
    return Finding("ports", "fail", f"127.0.0.1: {problem}", remedy)


def check_coordinator(facts: CoordinatorFacts) -> Finding:
    """Judge the environment's variables about other processes."""
    name = "coordinator"
    if facts.malformed:
        remedy = "See `docs/guides/clusters.md` for the variables of each launcher."
        return Finding(name, "fail", facts.malformed, remedy)
    cluster = facts.cluster
    if cluster is None:
        return Finding(name, "ok", "none: the environment names one process")
    detail = (
        f"{cluster.coordinator} ({cluster.kind}: this is process {cluster.process_id} "
        f"of {cluster.num_processes})"
    )
    if not facts.problem:
        return Finding(name, "ok", detail)
    remedy = (
        "That is right while a run has that port. Else look who does."
        if cluster.process_id == 0
        else "That is right before process 0 has started. Else look at the address and "
        "at firewalls."
    )
    return Finding(name, "warn", f"{detail}: {facts.problem}", remedy)


def check_launchers(facts: CoordinatorFacts) -> Finding:
    """Report what was found of each launcher, and what was looked for."""
    lines = "\n".join(facts.launchers)
    return Finding("launchers", "ok", lines or "see the coordinator")


def check_shared_memory(size_bytes: int | None) -> Finding:
    """Judge the size of /dev/shm; None if there is none.

    >>> check_shared_memory(8 << 30).status
    'ok'
    """
    size = "no /dev/shm" if size_bytes is None else f"{size_bytes / _MIB:,.0f} MiB"
    if size_bytes is not None and size_bytes >= _LITTLE_SHARED_MEMORY:
        return Finding("shared memory", "ok", size)
    detail = f"{size}: data loaders with workers and NCCL may fail"
    remedy = "In a container, start it with `--shm-size=8g`."
    return Finding("shared memory", "warn", detail, remedy)


def check_open_files(soft: int, hard: int) -> Finding:
    """Judge how many files a process may open.

    >>> check_open_files(256, 65536).remedy
    'Run `ulimit -n 65536` before a run of many processes.'
    """
    detail = f"{soft:,} (hard limit {hard:,})"
    if soft >= _FEW_FILES:
        return Finding("open files", "ok", detail)
    remedy = f"Run `ulimit -n {min(hard, 65536)}` before a run of many processes."
    return Finding("open files", "warn", detail, remedy)


def check_clock(now_s: float, *, installed_s: float, disk: DiskFacts) -> Finding:
    """Judge the time of day.

    Args:
      now_s: The time of day, in seconds since 1970.
      installed_s: When the files of this installation were written, likewise.
      disk: Result of writing to a directory.
    """
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    detail = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now_s < installed_s - _A_DAY_S:
        detail += ", before this installation was made"
        remedy = "Set the clock (TLS and the order of logs need it)."
        return Finding("clock", "fail", detail, remedy)
    if abs(disk.skew_s) > _CLOCK_SKEW_S:
        detail += f"; in {disk.directory} it is {disk.skew_s:+.0f} s off"
        return Finding("clock", "warn", detail, "Let both machines follow NTP.")
    return Finding("clock", "ok", detail)


def _satisfies(version: str, limits: SpecifierSet) -> bool:
    return limits.contains(version, prereleases=True)
