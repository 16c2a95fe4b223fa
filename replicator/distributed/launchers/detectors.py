"""The variables that each launcher sets, as one table, and what they say of a process.

A row names the variables that number a process, those that count all of them, and where
process 0 is found; to know another launcher is one more row. What several rows mean
together is decided in `detection.py`.
"""

import dataclasses
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

from replicator.distributed.clusters import join_address
from replicator.errors import ArgumentError

DEFAULT_PORT = 8482
"""The coordinator's port where nothing else says it; the one that JAX takes on TPUs."""

# Above the range of ports that Linux gives to outgoing connections.
_FIRST_PORT, _PORTS = 61440, 4096

_WEAK = frozenset(
    {
        *("JOB_COMPLETION_INDEX", "MASTER_ADDR", "MEGASCALE_COORDINATOR_ADDRESS"),
        *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"),
    }
)
"""Variables that are also set where there is no group: alone they say nothing."""

Environ = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What the variables of one launcher say.

    Attributes:
      kind: The launcher, by its name in `DETECTORS`.
      number: Which process this is; None if that is not said.
      size: How many there are; None likewise.
      address: `host:port` of process 0; None likewise.
      local_devices: Which of the host's accelerators are this process's; None for all.
      is_inmost: Whether variables show that it started this process after others.
      given: Variables that were read, to name the launcher in errors.
      missing: Variables that are not set and would have to be.
    """

    kind: str
    number: int | None
    size: int | None
    address: str | None
    local_devices: tuple[int, ...] | None
    is_inmost: bool
    given: tuple[str, ...]
    missing: tuple[str, ...]

    def agrees_with(self, other: "Claim") -> bool:
        """Return whether both can be true of one group."""
        pairs = (self.number, other.number), (self.size, other.size)
        return all(None in pair or pair[0] == pair[1] for pair in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """The variables of one launcher; `A|B` is A, or B in its place.

    Attributes:
      levels: Of processes: the variable of the number, and of how many there are. With
        several levels, outermost first, processes count on from one to the next.
      address: Finds `host:port` of process 0; None where it is not said.
      where: Variables that `address` cannot do without.
      local: The number among the processes of a host, and how many those are.
      is_inmost: See `Claim`.
    """

    levels: tuple[tuple[str, str], ...]
    address: Callable[[Environ], str | None]
    where: tuple[str, ...] = ()
    local: tuple[str, str] | None = None
    is_inmost: Callable[[Environ], bool] = lambda _: False

    @property
    def names(self) -> tuple[str, ...]:
        """All variables, as they stand in the table."""
        return (*(name for level in self.levels for name in level), *self.where)

    def read(self, kind: str, environ: Environ) -> Claim | None:
        """Return what is said; None if this launcher set nothing.

        Raises:
          ArgumentError: A number is malformed, or beyond the number of processes.
        """
        marks = {part for name in self.names for part in name.split("|")} - _WEAK
        if not any(environ.get(mark) for mark in marks):
            return None
        # A level of which nothing is said is left out: a TPU job of one slice.
        levels = [each for each in self.levels if _found(environ, *each)]
        levels = levels or [*self.levels]
        places = [_place(environ, *level) for level in levels]
        counts = [count for _, count in places if count is not None]
        numbers = [number for number, _ in places if number is not None]
        counted = len(counts) == len(levels)
        numbered = len(numbers) == len(levels) and (counted or len(levels) == 1)
        address = self.address(environ)
        needed = [name for level in levels for name in level]
        if address is None and (numbered or len(self.levels) == 1):
            needed += self.where
        return Claim(
            kind=kind,
            number=_count_on(numbers, counts) if numbered else None,
            size=math.prod(counts) if counted else None,
            address=address,
            local_devices=_own_device(environ, *self.local) if self.local else None,
            is_inmost=self.is_inmost(environ),
            given=tuple(_found(environ, *self.names)),
            missing=tuple(name for name in needed if not _found(environ, name)),
        )


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list of nodes: `node[007-015,20],b` is `node007`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _at(host: str, *, port: str) -> Callable[[Environ], str | None]:
    """Read the address from a variable, with its port, or the port from another."""

    def address(environ: Environ) -> str | None:
        value = environ.get(host)
        if not value or re.search(r"[^:]:\d+$", value):
            return value or None
        return join_address(value, _number(environ, port) or DEFAULT_PORT)

    return address


_pytorch_address = _at("MASTER_ADDR", port="MASTER_PORT")


def _torchrun_address(environ: Environ) -> str | None:
    """Read MASTER_ADDR and MASTER_PORT, or avoid the latter.

    With an agent's store it is torchrun's own for the whole run: then another port of
    that host. The count of restarts has no part in it, as it differs between hosts: an
    agent counts the failures of its own processes only.
    """
    address = _pytorch_address(environ)
    if address is None or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return address
    run = f"{environ.get('TORCHELASTIC_RUN_ID')} {address}"
    return join_address(environ["MASTER_ADDR"], _port_of(run))


def _mpi_address(environ: Environ) -> str | None:
    """Find the host of an MPI program's first process, where anything tells it.

    That is MASTER_ADDR, this host if all are here, the first of SLURM's allocation, or
    the host of Open MPI's `mpirun`, where JAX looks as well.
    """
    if environ.get("MASTER_ADDR"):
        return _pytorch_address(environ)
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    mpirun = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri)
    counts = [(_OMPI[1], _OMPI_LOCAL[1]), (_PMI[1], _PMI_LOCAL[1])]
    if any(
        None is not _number(environ, size) == _number(environ, local)
        for size, local in counts
    ):
        host = "127.0.0.1"
    elif nodes := environ.get("SLURM_JOB_NODELIST"):
        host = first_host(nodes)
    elif mpirun:
        host = mpirun[1] or mpirun[2]
    else:
        return None
    run = environ.get("PMIX_NAMESPACE") or environ.get("SLURM_JOB_ID")
    return join_address(host, _port_of(run) if run else DEFAULT_PORT)


def _tpu_address(environ: Environ) -> str | None:
    """Take the first worker; with several slices (MEGASCALE_…) that of the first."""
    hosts = environ.get(next(iter(_found(environ, _TPU_HOSTS)), ""), "")
    if (_number(environ, "MEGASCALE_NUM_SLICES") or 1) > 1:
        hosts = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    first = hosts.partition(",")[0].strip()
    first = first.rsplit(":", 1)[0] if first.count(":") == 1 else first
    return join_address(first, DEFAULT_PORT) if first else None


def _jobset_address(environ: Environ) -> str | None:
    """Take the coordinator's label, or the first pod's name by the other labels."""
    name, job = environ.get("JOBSET_NAME"), environ.get("JOBSET_REPLICATED_JOB")
    first = f"{name}-{job}-0-0.{name}" if name and job else None
    host = environ.get("JOBSET_COORDINATOR") or first
    return join_address(host, DEFAULT_PORT) if host else None


def _slurm_address(environ: Environ) -> str | None:
    """Take the step's first node, and a port of this step."""
    nodes, job = environ.get("SLURM_STEP_NODELIST"), _number(environ, "SLURM_JOB_ID")
    if not nodes or job is None:
        return None
    step = _number(environ, "SLURM_STEP_ID") or 0
    return join_address(first_host(nodes), _FIRST_PORT + (job * 8 + step) % _PORTS)


def _has_daemons_around(environ: Environ) -> bool:
    """Return whether SLURM's step has one task a host: the daemons of `mpirun`."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return re.fullmatch(r"1(\(x\d+\))?", tasks) is not None


_OURS = ("REPLICATOR_PROCESS_ID|JOB_COMPLETION_INDEX", "REPLICATOR_NUM_PROCESSES")
_JAX = ("JAX_PROCESS_ID|JAX_PROCESS_INDEX", "JAX_NUM_PROCESSES|JAX_PROCESS_COUNT")
_OMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_OMPI_LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_PMI = ("PMI_RANK", "PMI_SIZE")
_PMI_LOCAL = ("MPI_LOCALRANKID|PMI_LOCAL_RANK", "MPI_LOCALNRANKS|PMI_LOCAL_SIZE")
_SLICES = ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES")
_TPU_HOSTS = "TPU_PROCESS_ADDRESSES|TPU_WORKER_HOSTNAMES"

DETECTORS: dict[str, Detector] = {
    # Written by `replicator launch` or by hand. An indexed Kubernetes Job gives each
    # pod its number.
    "replicator": Detector(
        levels=(_OURS,),
        where=("REPLICATOR_COORDINATOR",),
        address=lambda environ: environ.get("REPLICATOR_COORDINATOR"),
    ),
    # Answers of Ray Train, which sets no variables: `ray_train.py`.
    "ray": Detector(
        levels=(("ray.train:world_rank", "ray.train:world_size"),),
        address=lambda environ: environ.get("ray.train:coordinator") or None,
        is_inmost=lambda _: True,
    ),
    # A job step: what `srun` sets for each task, and `sbatch` does not.
    "slurm": Detector(
        levels=(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS|SLURM_NTASKS"),),
        where=("SLURM_STEP_NODELIST", "SLURM_JOB_ID"),
        address=_slurm_address,
        local=("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        is_inmost=lambda environ: environ.get("SLURM_TASK_PID") == str(os.getpid()),
    ),
    # PyTorch's variables, which many schedulers' operators also set.
    "torchrun": Detector(
        levels=(("RANK", "WORLD_SIZE"),),
        where=("MASTER_ADDR",),
        address=_torchrun_address,
        local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        is_inmost=lambda environ: "TORCHELASTIC_RUN_ID" in environ,
    ),
    "openmpi": Detector(
        levels=(_OMPI,),
        address=_mpi_address,
        local=_OMPI_LOCAL,
        is_inmost=_has_daemons_around,
    ),
    # MPICH, Intel MPI, Cray's PALS, and SLURM and Flux where they stand in for them.
    "pmi": Detector(
        levels=(_PMI,),
        address=_mpi_address,
        local=_PMI_LOCAL,
        is_inmost=_has_daemons_around,
    ),
    # Kubeflow Trainer's runtime for JAX; many write the same names by hand.
    "kubeflow": Detector(
        levels=(_JAX,),
        where=("JAX_COORDINATOR_ADDRESS",),
        address=_at("JAX_COORDINATOR_ADDRESS", port="JAX_COORDINATOR_PORT"),
    ),
    # GKE's webhook, or the metadata of a TPU VM: `tpu_metadata.py`.
    "tpu": Detector(
        levels=(_SLICES, ("TPU_WORKER_ID", _TPU_HOSTS)),
        where=("MEGASCALE_COORDINATOR_ADDRESS",),
        address=_tpu_address,
    ),
    # Labels that the JobSet controller puts on each pod, handed on by the manifest
    # (`docs/manifests/jobset.yaml`); the Job controller sets JOB_COMPLETION_INDEX.
    "jobset": Detector(
        levels=(
            ("JOBSET_JOB_INDEX", "JOBSET_JOBS"),
            ("JOB_COMPLETION_INDEX", "JOBSET_PODS_PER_JOB"),
        ),
        where=("JOBSET_COORDINATOR",),
        address=_jobset_address,
    ),
}
"""Each launcher that is known. Of two that fit, the first is taken."""


def _found(environ: Environ, *names: str) -> list[str]:
    """Name those of the variables that are set, or what is set in their place."""
    choices = ([n for n in name.split("|") if environ.get(n)] for name in names)
    return [choice[0] for choice in choices if choice]


def _number(environ: Environ, name: str) -> int | None:
    for found in _found(environ, name):
        if re.fullmatch(r"\d+", environ[found]):
            return int(environ[found])
        if name == _TPU_HOSTS:
            return len(environ[found].split(","))
        raise ArgumentError(
            f"`{found}` must be a whole number in the environment, got "
            f"{environ[found]!r}. Set it for every process."
        )
    return None


def _place(environ: Environ, number: str, size: str) -> tuple[int | None, int | None]:
    """Read a process's number and how many there are.

    Raises:
      ArgumentError: They do not go together.
    """
    index, count = _number(environ, number), _number(environ, size)
    if count == 0 or (count is not None and index is not None and index >= count):
        names = "` and `".join(_found(environ, number, size))
        raise ArgumentError(
            f"`{names}` must be a number and how many there are, got {index} of "
            f"{count}. Number processes from 0."
        )
    return index, count


def _count_on(numbers: Sequence[int], counts: Sequence[int]) -> int:
    """Return a process's number over all levels, outermost first."""
    spans = (math.prod(counts[level + 1 :]) for level in range(len(numbers)))
    return sum(n * span for n, span in zip(numbers, spans, strict=True))


def _port_of(run: str) -> int:
    """Return the same port in all processes of a run, and most often no other's."""
    return _FIRST_PORT + zlib.crc32(run.encode()) % _PORTS


def _own_device(environ: Environ, number: str, shared: str) -> tuple[int, ...] | None:
    """Give each of several processes on a host one accelerator, as JAX does.

    Not where the scheduler has done so, and shows each process only its own.

    Args:
      environ: The environment.
      number: The variable that numbers the processes of one host.
      shared: How many those are; SLURM writes `4(x2),3` for two hosts and one.
    """
    told = "".join(environ[name] for name in _found(environ, shared))
    several = any(int(count) > 1 for count in re.findall(r"(?<!x)\b\d+", told))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    own = _number(environ, number)
    if not several or own is None or (visible and "," not in visible):
        return None
    return (own,)
