"""Judge the machine: disk, ports, coordinator, shared memory, open files, clock."""

import dataclasses
import datetime

from replicator.cli.checks.finding import Finding
from replicator.distributed.clusters import Cluster

_GIB = 2**30
_MIB = 2**20
_LITTLE_DISK = 10 * _GIB
_NO_DISK = 100 * _MIB
_SLOW_FSYNC_S = 1.0
_LITTLE_SHARED_MEMORY = 256 * _MIB
_FEW_FILES = 4096
_CLOCK_SKEW_S = 5.0
_A_DAY_S = 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiskFacts:
    """What writing to a directory showed.

    Attributes:
      directory: Which one.
      problem: Why it could not be written to; empty if it could.
      free_bytes: What this user may still write.
      fsync_s: How long 1 MiB took to be on the disk, its name included.
      skew_s: By how much the files' clock is ahead of this machine's.
    """

    directory: str
    problem: str = ""
    free_bytes: int = 0
    fsync_s: float = 0.0
    skew_s: float = 0.0


def check_disk(facts: DiskFacts) -> Finding:
    """Judge whether checkpoints and metrics can go to a directory."""
    name = "disk"
    if facts.problem:
        return Finding(
            name=name,
            status="fail",
            detail=f"{facts.directory}: {facts.problem}",
            remedy="Name a directory that you may write to: `--directory`.",
        )
    free = f"{facts.free_bytes / _GIB:.1f} GiB free"
    detail = f"{facts.directory}: {free}, fsync {1000 * facts.fsync_s:.0f} ms"
    if facts.free_bytes < _LITTLE_DISK:
        status = "fail" if facts.free_bytes < _NO_DISK else "warn"
        remedy = "Free space, or save elsewhere; a full disk loses checkpoints."
        return Finding(name=name, status=status, detail=detail, remedy=remedy)
    if facts.fsync_s > _SLOW_FSYNC_S:
        remedy = "Save to a faster disk, or less often."
        return Finding(name=name, status="warn", detail=detail, remedy=remedy)
    return Finding(name=name, status="ok", detail=detail)


def check_loopback(problem: str) -> Finding:
    """Judge whether processes of this machine can talk to each other.

    Args:
      problem: Why a connection to 127.0.0.1 failed; empty if it did not.
    """
    if not problem:
        detail = "127.0.0.1 binds and connects"
        return Finding(name="ports", status="ok", detail=detail)
    return Finding(
        name="ports",
        status="fail",
        detail=f"127.0.0.1: {problem}",
        remedy="Bring the loopback interface up: `ip link set lo up`.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorFacts:
    """What the environment says of other processes, and of the one they all ask first.

    Attributes:
      cluster: Those processes; None if there are no others.
      malformed: What is wrong with the variables; empty if nothing is.
      problem: Why this process cannot play its part: to listen as process 0, to reach
        process 0 as another one. Empty if it can.
    """

    cluster: Cluster | None = None
    malformed: str = ""
    problem: str = ""

    @property
    def several_processes(self) -> bool:
        """Whether the environment announces more than one process."""
        return self.cluster is not None and self.cluster.num_processes > 1


def check_coordinator(facts: CoordinatorFacts) -> Finding:
    """Judge what the environment says of other processes."""
    name = "coordinator"
    if facts.malformed:
        remedy = "Set the variables as in `replicator.distributed.initialize`'s help."
        return Finding(name=name, status="fail", detail=facts.malformed, remedy=remedy)
    cluster = facts.cluster
    if cluster is None:
        detail = "none: the environment names one process"
        return Finding(name=name, status="ok", detail=detail)
    detail = (
        f"{cluster.coordinator} ({cluster.kind}: this is process {cluster.process_id} "
        f"of {cluster.num_processes})"
    )
    if not facts.problem:
        return Finding(name=name, status="ok", detail=detail)
    remedy = (
        "That is right while a run has that port. Else look who does."
        if cluster.process_id == 0
        else "That is right before process 0 has started. Else look at the address and "
        "at firewalls."
    )
    detail = f"{detail}: {facts.problem}"
    return Finding(name=name, status="warn", detail=detail, remedy=remedy)


def check_shared_memory(size_bytes: int | None) -> Finding:
    """Judge the size of /dev/shm; None if there is none."""
    name = "shared memory"
    size = "no /dev/shm" if size_bytes is None else f"{size_bytes / _MIB:,.0f} MiB"
    if size_bytes is not None and size_bytes >= _LITTLE_SHARED_MEMORY:
        return Finding(name=name, status="ok", detail=size)
    return Finding(
        name=name,
        status="warn",
        detail=f"{size}: data loaders with workers and NCCL may fail",
        remedy="In a container, start it with `--shm-size=8g`.",
    )


def check_open_files(soft: int, hard: int) -> Finding:
    """Judge how many files a process may open."""
    name = "open files"
    detail = f"{soft:,} (hard limit {hard:,})"
    if soft >= _FEW_FILES:
        return Finding(name=name, status="ok", detail=detail)
    remedy = f"Run `ulimit -n {min(hard, 65536)}` before a run of many processes."
    return Finding(name=name, status="warn", detail=detail, remedy=remedy)


def check_clock(now_s: float, *, installed_s: float, disk: DiskFacts) -> Finding:
    """Judge the time of day.

    Args:
      now_s: The time of day, in seconds since 1970.
      installed_s: When the files of this installation were written, likewise.
      disk: What writing showed.
    """
    name = "clock"
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    detail = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now_s < installed_s - _A_DAY_S:
        remedy = "Set the clock (TLS and the order of logs need it)."
        detail += ", before this installation was made"
        return Finding(name=name, status="fail", detail=detail, remedy=remedy)
    if abs(disk.skew_s) > _CLOCK_SKEW_S:
        return Finding(
            name=name,
            status="warn",
            detail=f"{detail}; in {disk.directory} it is {disk.skew_s:+.0f} s off",
            remedy="Let both machines follow NTP.",
        )
    return Finding(name=name, status="ok", detail=detail)
