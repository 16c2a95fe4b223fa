"""Measure what the checks judge: each function touches the machine and never raises."""

import glob
import importlib.metadata
import os
import resource
import socket
import tempfile
import time
from pathlib import Path

from replicator.base.host.fake_devices import (
    ENVIRONMENT_VARIABLE as FAKE_DEVICES_VARIABLE,
)
from replicator.cli.checks.machine import CoordinatorFacts, DiskFacts
from replicator.distributed.clusters import detect
from replicator.errors import ReplicatorError

_CONNECT_TIMEOUT_S = 3.0
_MIB = 2**20


def installed_versions() -> dict[str, str]:
    """Return the version of each installed distribution, by lower-case name."""
    return {
        (found.metadata["Name"] or "").lower(): found.version
        for found in importlib.metadata.distributions()
    }


def accelerators() -> tuple[str, ...]:
    """Name the kinds of accelerators that are there, if the user named none."""
    if os.environ.get("JAX_PLATFORMS") or os.environ.get(FAKE_DEVICES_VARIABLE):
        return ()
    files = {"gpu": ("/dev/nvidia[0-9]*", "/dev/kfd"), "tpu": ("/dev/accel[0-9]*",)}
    return tuple(
        kind
        for kind, patterns in files.items()
        if any(glob.glob(pattern) for pattern in patterns)
    )


def disk_facts(directory: Path) -> DiskFacts:
    """Write 1 MiB to `directory`, or to what there is of its parents, and remove it."""
    there = next(path for path in [directory, *directory.parents] if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-") as file:
            wall_s, started_s = time.time(), time.monotonic()
            file.write(os.urandom(_MIB))
            file.flush()
            os.fsync(file.fileno())
            _fsync_directory(there)
            fsync_s = time.monotonic() - started_s
            skew_s = os.fstat(file.fileno()).st_mtime - wall_s
        found = os.statvfs(there)
    except OSError as failure:
        return DiskFacts(directory=str(directory), problem=_told(failure))
    return DiskFacts(
        directory=str(directory),
        free_bytes=found.f_bavail * found.f_frsize,
        fsync_s=fsync_s,
        skew_s=skew_s,
    )


def write_problem(directory: str | None) -> str:
    """Say why a directory cannot be written to; nothing if it can, or is None."""
    return "" if directory is None else disk_facts(Path(directory)).problem


def loopback_problem() -> str:
    """Listen on 127.0.0.1 and connect to it; say what went wrong, if anything."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            return _connect_problem("127.0.0.1", port)
    except OSError as failure:
        return _told(failure)


def coordinator_facts() -> CoordinatorFacts:
    """Find the coordinator in the environment; listen as it, or knock at it."""
    try:
        cluster = detect(os.environ)
    except ReplicatorError as failure:
        return CoordinatorFacts(malformed=str(failure))
    if cluster is None:
        return CoordinatorFacts()
    part = _listen_problem if cluster.process_id == 0 else _connect_problem
    problem = part(cluster.host, cluster.port)
    return CoordinatorFacts(cluster=cluster, problem=problem)


def shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm; None if there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def open_files() -> tuple[int, int]:
    """Return how many files a process may open: the soft and the hard limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def installed_at_s() -> float:
    """Return when the newest file of this package was written."""
    package = Path(__file__).parents[2]
    return max(path.stat().st_mtime for path in package.rglob("*.py"))


def _listen_problem(host: str, port: int) -> str:
    try:
        socket.create_server((host, port)).close()
    except OSError as failure:
        return _told(failure)
    return ""


def _connect_problem(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as failure:
        return _told(failure)
    return ""


def _fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _told(failure: OSError) -> str:
    return failure.strerror or str(failure)
