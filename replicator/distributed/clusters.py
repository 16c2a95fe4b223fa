"""Find out from the environment which process of which group this is.

One row of `DETECTORS` per kind of cluster, the most explicit first; each is a pure
function of the environment. To know another scheduler is one function and one row.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from replicator.errors import ArgumentError, check_text, check_whole

DEFAULT_PORT = 8482
"""The coordinator's port where nothing else says it; the one that JAX takes on TPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A group of processes, and which of them this one is.

    Attributes:
      kind: What it was found by: a name in `DETECTORS`, or "arguments".
      coordinator: `host:port` on which process 0 serves the group.
      num_processes: How many processes the group has.
      process_id: Which one this is, from 0.
      local_devices: Which of the host's accelerators are this process's; None for all.
    """

    kind: str
    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_text("coordinator", self.coordinator)
        check_address("coordinator", self.coordinator)
        check_whole("num_processes", self.num_processes)
        check_whole("process_id", self.process_id)
        if self.num_processes < 1:
            raise ArgumentError(
                f"`num_processes` must be at least 1, got {self.num_processes} "
                f"(from {self.kind}). Say how many processes the group has."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ArgumentError(
                f"`process_id` must be 0 to {self.num_processes - 1}, got "
                f"{self.process_id} (from {self.kind}). Number processes from 0."
            )

    @property
    def host(self) -> str:
        """The host of the coordinator."""
        return split_address(self.coordinator)[0]

    @property
    def port(self) -> int:
        """The port of the coordinator."""
        return split_address(self.coordinator)[1]


def detect(environ: Mapping[str, str]) -> Cluster | None:
    """Return the cluster that the environment describes; None if it describes none.

    Args:
      environ: Environment variables, for example `os.environ`.

    Raises:
      ArgumentError: A variable that belongs to a cluster is missing or malformed.

    >>> cluster = detect({"MASTER_ADDR": "node1", "RANK": "1", "WORLD_SIZE": "4"})
    >>> cluster.coordinator, cluster.num_processes, cluster.process_id
    ('node1:8482', 4, 1)
    """
    for detector in DETECTORS.values():
        if cluster := detector(environ):
            return cluster
    return None


def as_environment(cluster: Cluster) -> dict[str, str]:
    """Return the variables by which `detect` finds this group in another process."""
    return {
        "REPLICATOR_COORDINATOR": cluster.coordinator,
        "REPLICATOR_NUM_PROCESSES": str(cluster.num_processes),
        "REPLICATOR_PROCESS_ID": str(cluster.process_id),
    }


def _detect_replicator(environ: Mapping[str, str]) -> Cluster | None:
    """Ours, written by `replicator launch` or by hand.

    An indexed Kubernetes Job gives each pod its number as JOB_COMPLETION_INDEX.
    """
    if "REPLICATOR_COORDINATOR" not in environ:
        return None
    number = "REPLICATOR_PROCESS_ID"
    if number not in environ and "JOB_COMPLETION_INDEX" in environ:
        number = "JOB_COMPLETION_INDEX"
    return Cluster(
        kind="replicator",
        coordinator=environ["REPLICATOR_COORDINATOR"],
        num_processes=_number(environ, "REPLICATOR_NUM_PROCESSES"),
        process_id=_number(environ, number),
    )


def _detect_torchrun(environ: Mapping[str, str]) -> Cluster | None:
    """PyTorch's variables, which many schedulers' operators also set."""
    if not {"MASTER_ADDR", "RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    port = _number(environ, "MASTER_PORT", default=DEFAULT_PORT)
    return Cluster(
        kind="torchrun",
        coordinator=join_address(environ["MASTER_ADDR"], port),
        num_processes=_number(environ, "WORLD_SIZE"),
        process_id=_number(environ, "RANK"),
        local_devices=_own_device(
            environ, "LOCAL_RANK", environ.get("LOCAL_WORLD_SIZE", "1")
        ),
    )


def _detect_tpu(environ: Mapping[str, str]) -> Cluster | None:
    """TPU hosts: set by GKE, or from the metadata of a TPU VM (`tpu_metadata`).

    With several slices (MEGASCALE_…) processes count on from slice to slice.
    """
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not hosts or "TPU_WORKER_ID" not in environ:
        return None
    workers = [_without_port(host) for host in hosts.split(",")]
    slices = _number(environ, "MEGASCALE_NUM_SLICES", default=1)
    slice_id = _number(environ, "MEGASCALE_SLICE_ID", default=0)
    first = _without_port(environ.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0])
    worker = _number(environ, "TPU_WORKER_ID")
    return Cluster(
        kind="tpu",
        coordinator=join_address(first, DEFAULT_PORT),
        num_processes=len(workers) * slices,
        process_id=slice_id * len(workers) + worker,
    )


def _detect_jobset(environ: Mapping[str, str]) -> Cluster | None:
    """Kubernetes JobSet, whose annotations the manifest hands on as variables.

    See `docs/manifests/jobset.yaml`: the JobSet controller annotates each pod, the Job
    controller sets JOB_COMPLETION_INDEX.
    """
    if "JOBSET_COORDINATOR" not in environ:
        return None
    pods = _number(environ, "JOBSET_PODS_PER_JOB", default=1)
    jobs = _number(environ, "JOBSET_JOBS", default=1)
    job = _number(environ, "JOBSET_JOB_INDEX", default=0)
    return Cluster(
        kind="jobset",
        coordinator=join_address(environ["JOBSET_COORDINATOR"], DEFAULT_PORT),
        num_processes=pods * jobs,
        process_id=job * pods + _number(environ, "JOB_COMPLETION_INDEX"),
    )


def _detect_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """A SLURM job step: what `srun` sets for each task, and `sbatch` does not."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environ.keys():
        return None
    tasks = "SLURM_STEP_NUM_TASKS"
    step = _number(environ, "SLURM_STEP_ID", default=0)
    # Above the range of ports that Linux gives to outgoing connections.
    port = 61440 + (_number(environ, "SLURM_JOB_ID") * 8 + step) % 4096
    return Cluster(
        kind="slurm",
        coordinator=join_address(first_host(environ["SLURM_STEP_NODELIST"]), port),
        num_processes=_number(environ, tasks if tasks in environ else "SLURM_NTASKS"),
        process_id=_number(environ, "SLURM_PROCID"),
        local_devices=_own_device(
            environ, "SLURM_LOCALID", environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
        ),
    )


DETECTORS: dict[str, Callable[[Mapping[str, str]], Cluster | None]] = {
    "replicator": _detect_replicator,
    "torchrun": _detect_torchrun,
    "tpu": _detect_tpu,
    "jobset": _detect_jobset,
    "slurm": _detect_slurm,
}
"""Each kind of cluster that is known, and how it is found; the first found counts."""


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list of nodes: `node[007-015,20],b` is `node007`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def join_address(host: str, port: int) -> str:
    """Write `host:port`; an IPv6 host in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`, or `[IPv6]:port`, into its two parts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_address(name: str, address: str) -> None:
    """Refuse what is not `host:port` with a host that names one machine.

    Raises:
      ArgumentError: It is not.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})", address)
    if not match or not 0 < int(match[2]) < 65536:
        raise ArgumentError(
            f"`{name}` must be host:port, got {address!r}. Use for example "
            "`10.0.0.1:8482`."
        )
    if match[1] in ("0.0.0.0", "[::]"):
        raise ArgumentError(
            f"`{name}` must name one host, got {address!r}, which is every interface. "
            "Name an address that the other processes reach."
        )


def _own_device(
    environ: Mapping[str, str], local_id: str, processes: str
) -> tuple[int, ...] | None:
    """Give each of several processes on a host one accelerator, as JAX does.

    Not where the scheduler has done so, and shows each process only its own.

    Args:
      environ: The environment.
      local_id: The variable that numbers the processes of one host.
      processes: How many those are; SLURM writes `4(x2),3` for two hosts and one.
    """
    several = any(int(count) > 1 for count in re.findall(r"(?<!x)\b\d+", processes))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not several or local_id not in environ or (visible and "," not in visible):
        return None
    return (_number(environ, local_id),)


def _without_port(host: str) -> str:
    return host.strip().rsplit(":", 1)[0] if host.count(":") == 1 else host.strip()


def _number(
    environ: Mapping[str, str], name: str, *, default: int | None = None
) -> int:
    value = environ.get(name) or (None if default is None else str(default))
    if value is None or not re.fullmatch(r"\d+", value):
        found = "but is not set" if value is None else f"got {value!r}"
        raise ArgumentError(
            f"`{name}` must be a whole number in the environment, {found}. Set it for "
            "every process."
        )
    return int(value)
