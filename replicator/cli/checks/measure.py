"""Measure what the checks judge: each function touches the machine and never raises.

As a program (`python -m`) it starts JAX, adds numbers over all devices and prints the
JSON of a `Probe`. On a faulty machine the start of an accelerator, or a collective over
several, hangs or aborts: `probe` waits for it, with a bound.
"""

import dataclasses
import glob
import importlib.metadata
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import replicator
from replicator.base.host.compilation_cache import enable_compilation_cache
from replicator.base.host.fake_devices import (
    ENVIRONMENT_VARIABLE as FAKE_DEVICES_VARIABLE,
)
from replicator.base.host.paths import sync
from replicator.base.mesh import jax_devices, replica_mesh
from replicator.distributed.clusters import Cluster
from replicator.distributed.launchers.detection import detect, explain
from replicator.distributed.launchers.tpu_metadata import with_tpu_metadata
from replicator.engine.layout import EQUAL, examples
from replicator.engine.replicated import ReplicatedLayout
from replicator.errors import ReplicatorError

_CONNECT_TIMEOUT_S = 3.0
_MIB = 2**20
_DRIVER_OF_CUDA_13 = 580


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Devices and settings of JAX in a fresh process.

    Attributes:
      platform: Platform of the devices: cpu, gpu, tpu.
      kind: Kind of the first device.
      devices: Number of devices.
      pool: Most threads that XLA's CPU client has for them.
      asynchronous: Whether CPU computations return before they are done.
      total: Sum of 1 over all devices.
      seconds: Time from the first look at the devices to that sum.
      cache_directory: Directory of compiled programs; None if they are not kept.
      cache_problem: Why they are not kept.
    """

    platform: str
    kind: str
    devices: int
    pool: int
    asynchronous: bool
    total: float
    seconds: float
    cache_directory: str | None
    cache_problem: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiskFacts:
    """Result of writing to a directory.

    Attributes:
      directory: The directory.
      problem: Why it could not be written to; empty if it could.
      free_bytes: Number of bytes that this user may still write.
      fsync_s: Seconds until 1 MiB, and the name of its file, were on the disk.
      skew_s: Seconds by which the files' clock is ahead of this machine's.
    """

    directory: str
    problem: str = ""
    free_bytes: int = 0
    fsync_s: float = 0.0
    skew_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorFacts:
    """Other processes that the environment names, and their coordinator.

    Attributes:
      cluster: Those processes; None if there are no others.
      malformed: Fault of the variables; empty if there is none.
      problem: Why process 0 cannot listen, or another process cannot reach it; empty
        if it can.
      launchers: A line on each launcher: the variables found, or looked for.
    """

    cluster: Cluster | None = None
    malformed: str = ""
    problem: str = ""
    launchers: tuple[str, ...] = ()

    @property
    def several_processes(self) -> bool:
        """True if the environment announces more than one process."""
        return self.cluster is not None and self.cluster.num_processes > 1


def probe(*, timeout_s: float) -> Probe:
    """Start JAX in a new process, and return its report.

    Args:
      timeout_s: Seconds until it is killed.

    Raises:
      TimeoutError: It took longer.
      RuntimeError: It ended with an error; the message is its last line.
    """
    # A run that holds the GPU's memory must not be asked for most of it once more.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "replicator.cli.checks.measure"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as expired:
        raise TimeoutError(
            f"no answer from JAX and an all-reduce within {timeout_s:g} s"
        ) from expired
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(_last_error(done.stderr) or f"exit code {done.returncode}")
    return Probe(**json.loads(lines[-1]))


def look() -> Probe:
    """Start JAX in this process and look."""
    problems: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: problems.append(record.getMessage())
    logging.getLogger("replicator").addHandler(handler)
    started_s = time.monotonic()
    devices = jax_devices()
    total = _add_over_devices()
    seconds = time.monotonic() - started_s
    enable_compilation_cache()
    return Probe(
        platform=devices[0].platform,
        kind=devices[0].device_kind,
        devices=len(devices),
        pool=max(os.cpu_count() or 1, len(devices), int(os.environ.get("NPROC") or 0)),
        asynchronous=_is_asynchronous(),
        total=total,
        seconds=seconds,
        cache_directory=jax.config.jax_compilation_cache_dir,  # pyright: ignore
        cache_problem=problems[-1] if problems else "",
    )


def installed_versions() -> dict[str, str]:
    """Return the version of each installed distribution, by lower-case name."""
    return {
        (found.metadata["Name"] or "").lower(): found.version
        for found in importlib.metadata.distributions()
    }


def accelerators() -> tuple[str, ...]:
    """Return the extras of JAX for this machine's accelerators, as JAX names them.

    None if the user chose the platform. Of the two for NVIDIA's GPUs it is `cuda13` if
    the driver is of version 580 or later, as CUDA 13 asks for.
    """
    if os.environ.get("JAX_PLATFORMS") or os.environ.get(FAKE_DEVICES_VARIABLE):
        return ()
    files = {
        cuda_extra(_read("/proc/driver/nvidia/version")): "/dev/nvidia[0-9]*",
        "rocm": "/dev/kfd",
        "tpu": "/dev/accel[0-9]*",
    }
    found = [extra for extra, pattern in files.items() if glob.glob(pattern)]
    # Newer TPU machines offer their chips through VFIO, as others offer other devices.
    if "tpu" not in found and "TPU_ACCELERATOR_TYPE" in os.environ:
        found += ["tpu"] if glob.glob("/dev/vfio/[0-9]*") else []
    return tuple(found)


def cuda_extra(driver: str) -> str:
    """Return the extra for a driver of NVIDIA, by the text in which it shows itself.

    >>> cuda_extra("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06 ...")
    'cuda13'
    """
    version = re.search(r"\b(\d{3,})\.\d+", driver)
    is_new = version is not None and int(version[1]) >= _DRIVER_OF_CUDA_13
    return "cuda13" if is_new else "cuda12"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def disk_facts(directory: Path) -> DiskFacts:
    """Write 1 MiB to `directory`, or to what there is of its parents, and remove it."""
    there = next(path for path in [directory, *directory.parents] if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-") as file:
            wall_s, started_s = time.time(), time.monotonic()
            file.write(os.urandom(_MIB))
            file.flush()
            os.fsync(file.fileno())
            sync(there)
            fsync_s = time.monotonic() - started_s
            skew_s = os.fstat(file.fileno()).st_mtime - wall_s
        found = os.statvfs(there)
    except OSError as failure:
        return DiskFacts(directory=str(directory), problem=_message(failure))
    return DiskFacts(
        directory=str(directory),
        free_bytes=found.f_bavail * found.f_frsize,
        fsync_s=fsync_s,
        skew_s=skew_s,
    )


def write_problem(directory: str | None) -> str:
    """Return why a directory cannot be written to; "" if it can, or is None.

    >>> write_problem(None)
    ''
    """
    return "" if directory is None else disk_facts(Path(directory)).problem


def loopback_problem() -> str:
    """Listen on 127.0.0.1 and connect to it; return the error, or ""."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            return _connect_problem("127.0.0.1", port)
    except OSError as failure:
        return _message(failure)


def coordinator_facts() -> CoordinatorFacts:
    """Find the coordinator in the environment; listen as it, or connect to it."""
    launchers: tuple[str, ...] = ()
    try:
        environ = with_tpu_metadata(os.environ)
        launchers = tuple(explain(environ))
        cluster = detect(environ)
    except ReplicatorError as failure:
        return CoordinatorFacts(malformed=str(failure), launchers=launchers)
    if cluster is None:
        return CoordinatorFacts(launchers=launchers)
    part = _listen_problem if cluster.process_id == 0 else _connect_problem
    problem = part(cluster.host, cluster.port)
    return CoordinatorFacts(cluster=cluster, problem=problem, launchers=launchers)


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
        return _message(failure)
    return ""


def _connect_problem(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as failure:
        return _message(failure)
    return ""


def _message(failure: OSError) -> str:
    return failure.strerror or str(failure)


def _add_over_devices() -> float:
    layout = ReplicatedLayout(replica_mesh())
    add = layout.spread(
        lambda ones: replicator.all_reduce(ones, op="sum"),
        inputs=(examples(),),
        outputs=EQUAL,
    )
    return float(jax.jit(add)(jnp.ones(layout.num_replicas))[0])


def _is_asynchronous() -> bool:
    # This setting, unlike others, is not an attribute of `jax.config` (0.10 to 0.12).
    return jax.config.read("jax_cpu_enable_async_dispatch")  # pyright: ignore


def _last_error(stderr: str) -> str:
    errors = [
        line for line in stderr.splitlines() if re.match(r"\S.*(Error|error)", line)
    ]
    return (errors or stderr.splitlines() or [""])[-1].strip()


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(look())))
