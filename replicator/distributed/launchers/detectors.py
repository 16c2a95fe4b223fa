"""A table of the variables that each launcher sets, and how they are read.

A row names the variables that number a process, those that count all of them, and how
the address of process 0 is found; another launcher is one more row. `detection.py`
chooses among several rows that are set.
"""

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

from replicator.distributed.clusters import join_address
from replicator.errors import ArgumentError

DEFAULT_PORT = 8482
"""The coordinator's port by default; the one that JAX takes on TPUs."""

# Above the range of ports that Linux gives to outgoing connections.
_FIRST_PORT, _PORTS = 61440, 4096

_WEAK = frozenset(
    {
        *("CLOUD_TPU_TASK_ID", "JOB_COMPLETION_INDEX", "MASTER_ADDR"),
        *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"),
    }
)
"""Variables that are also set where there is no group: alone they mean nothing."""

Environ = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The place of this process by the variables of one launcher.

    Attributes:
      kind: Name of the launcher in `DETECTORS`.
      number: Number of this process; None if it is not set.
      size: Number of processes; None if it is not set.
      address: `host:port` of process 0; None if it is not set.
      local_devices: Accelerators of the host that are this process's; None for all.
      is_inmost: Whether variables show that it started this process after others.
      given: Variables that are set, to name the launcher in errors.
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
      levels: Variables of the number of a process and of the number of processes, for
        each level of a hierarchy, outermost first.
      address: Finds `host:port` of process 0; None where it is not set.
      where: Variables that `address` cannot do without.
      local: Variables of the number among the processes of a host, and of their number.
      is_inmost: See `Claim`.
    """

    levels: tuple[tuple[str, str], ...]
    address: Callable[[Environ], str | None]
    where: tuple[str, ...] = ()
    local: tuple[str, str] | None = None
    is_inmost: Callable[[Environ], bool] = lambda _: False

    @property
    def names(self) -> list[str]:
        """All variables, as they stand in the table."""
        return [*(name for level in self.levels for name in level), *self.where]

    def read(self, kind: str, environ: Environ) -> Claim | None:
        """Return the claim of this launcher; None if it has set nothing.

        Raises:
          ArgumentError: A number is malformed, or beyond the number of processes.
        """
        marks = {part for name in self.names for part in name.split("|")} - _WEAK
        if not any(environ.get(mark) for mark in marks):
            return None
        # A level that is not set is left out: a TPU job of one slice.
        levels = [each for each in self.levels if _found(environ, *each)] or self.levels
        number, size = _combine([_place(environ, *level) for level in levels])
        address = self.address(environ)
        needed = [name for level in levels for name in level]
        needed += self.where if address is None else ()
        return Claim(
            kind=kind,
            number=number,
            size=size,
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
    """Read MASTER_ADDR, and MASTER_PORT unless torchrun's agent listens there.

    An agent's store has that port for the whole run: then take another port of the
    host. It does not depend on the count of restarts, which differs between hosts: an
    agent counts the failures of its own processes only.
    """
    address = _pytorch_address(environ)
    if address is None or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return address
    run = f"{environ.get('TORCHELASTIC_RUN_ID')} {address}"
    return join_address(environ["MASTER_ADDR"], _port_of(run))


def _mpi_address(environ: Environ) -> str | None:
    """Find the host of an MPI program's first process, if a variable names it.

    That is MASTER_ADDR, this host if all are here, the first of SLURM's allocation, or
    the host of Open MPI's `mpirun`, where JAX looks as well.
    """
    if environ.get("MASTER_ADDR"):
        return _pytorch_address(environ)
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    sizes = [
        (_number(environ, size), _number(environ, local))
        for (_, size), (_, local) in ((_OMPI, _OMPI_LOCAL), (_PMI, _PMI_LOCAL))
    ]
    if any(size is not None and size == local for size, local in sizes):
        host = "127.0.0.1"
    elif nodes := environ.get("SLURM_JOB_NODELIST"):
        host = first_host(nodes)
    elif mpirun := re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri):
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
    # GKE's webhook, or the metadata of a TPU VM (`tpu_metadata.py`); several processes
    # on one host are numbered by CLOUD_TPU_TASK_ID.
    "tpu": Detector(
        levels=(_SLICES, ("TPU_WORKER_ID|CLOUD_TPU_TASK_ID", _TPU_HOSTS)),
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
"""The known launchers. Of two that fit, the first is taken."""


def _found(environ: Environ, *names: str) -> list[str]:
    """Return the names that are set; of `A|B` the first one that is."""
    choices = ([n for n in name.split("|") if environ.get(n)] for name in names)
    return [choice[0] for choice in choices if choice]


def _number(environ: Environ, name: str) -> int | None:
    for found in _found(environ, name):
        if re.fullmatch("[0-9]{1,9}", environ[found]):
            return int(environ[found])
        if name == _TPU_HOSTS:
            return len(environ[found].split(","))
        raise ArgumentError(
            f"`{found}` must be a whole number in the environment, got "
            f"{environ[found]!r}. Set it for every process."
        )
    return None


def _place(environ: Environ, number: str, size: str) -> tuple[int | None, int | None]:
    """Read the number of a process and the number of processes.

    Raises:
      ArgumentError: The one is not below the other.
    """
    index, count = _number(environ, number), _number(environ, size)
    if count == 0 or (count is not None and index is not None and index >= count):
        names = "` and `".join(_found(environ, number, size))
        raise ArgumentError(
            f"`{names}` must be the number of a process and of all, got {index} of "
            f"{count}. Number processes from 0."
        )
    return index, count


def _combine(
    places: Sequence[tuple[int | None, int | None]],
) -> tuple[int | None, int | None]:
    """Return a process's number over all levels, and the number of processes."""
    number, size = places[0]
    for index, count in places[1:]:
        if number is None or size is None or index is None or count is None:
            return None, None
        number, size = number * count + index, size * count
    return number, size


def _port_of(run: str) -> int:
    """Return a port that is the same in all processes of a run, by hashing its name."""
    return _FIRST_PORT + zlib.crc32(run.encode()) % _PORTS


def _own_device(environ: Environ, number: str, shared: str) -> tuple[int, ...] | None:
    """Give each of several processes on a host one accelerator, as JAX does.

    Not where the scheduler has done so, and shows each process only its own.

    Args:
      environ: The environment.
      number: Variable that numbers the processes of one host.
      shared: Variable that counts them; SLURM writes `4(x2),3` for two hosts and one.
    """
    counts = "".join(environ[name] for name in _found(environ, shared))
    several = any(int(count) > 1 for count in re.findall(r"(?<!x)\b\d+", counts))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    own = _number(environ, number)
    if not several or own is None or (visible and "," not in visible):
        return None
    return (own,)
