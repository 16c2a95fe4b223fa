"""Environments of whole groups of processes, and the right outcome for each process."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from benchmarks.launchers import environments as env
from replicator.distributed.launchers.detection import detect
from replicator.distributed.launchers.detectors import DETECTORS
from replicator.errors import ArgumentError

Environ = Mapping[str, str]


class Case(NamedTuple):
    """A group of processes.

    Attributes:
      environ: Variables of process `number` of the group.
      size: Number of processes.
      expected: "alone" where that is right: each is a program of its own.
    """

    environ: Callable[[int], Environ]
    size: int
    expected: Literal["found", "refused", "alone"] = "found"


def outcome(environ: Environ) -> tuple[int, int] | Literal["refused", "alone"]:
    """Return the place that a process finds in its environment, or that it has none."""
    try:
        found = detect({"PATH": "/bin", **environ})
    except ArgumentError:
        return "refused"
    if found is None or found.num_processes == 1:
        return "alone"
    return found.process_id, found.num_processes


def count(case: Case) -> tuple[int, int]:
    """Count the processes that train alone unasked, and those that are wrong else."""
    found = [outcome(case.environ(number)) for number in range(case.size)]
    right = [
        (number, case.size) if case.expected == "found" else case.expected
        for number in range(case.size)
    ]
    wrong = [one for one, other in zip(found, right, strict=True) if one != other]
    return wrong.count("alone"), len(wrong) - wrong.count("alone")


def _without_number(kind: str, number: int) -> Environ:
    name = DETECTORS[kind].levels[-1][0].partition("|")[0]
    return {k: v for k, v in env.LAUNCHERS[kind](number, 4).items() if k != name}


def _daemons(number: int) -> dict[str, str]:
    """Return the variables of SLURM's step for the daemons of `mpirun`."""
    return env.slurm(number // 4, 2) | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


WHOLE = {
    kind: Case(lambda n, kind=kind: env.LAUNCHERS[kind](n, 4), 4)
    for kind in env.LAUNCHERS
} | {
    "slices of TPUs": Case(lambda n: env.tpu_slices(n, 4), 4),
    "torchrun with its agent's store": Case(lambda n: env.torchrun(n, 4), 4),
}

HALF = {
    f"{kind} without numbers": Case(
        lambda n, kind=kind: _without_number(kind, n), 4, "refused"
    )
    for kind in env.LAUNCHERS
} | {
    "a size alone": Case(lambda _: {"WORLD_SIZE": "4"}, 4, "refused"),
    "numbers alone": Case(lambda n: {"RANK": str(n)}, 4, "refused"),
    "mpiexec on hosts that it does not name": Case(
        lambda n: {"PMI_RANK": str(n), "PMI_SIZE": "4"}, 4, "refused"
    ),
    "an address alone": Case(
        lambda _: {"JAX_COORDINATOR_ADDRESS": "node1:1"}, 4, "refused"
    ),
}

CONTRADICTORY = {
    f"{one} and {other}": Case(
        lambda n, one=one, other=other: (
            env.LAUNCHERS[one](n, 4) | env.LAUNCHERS[other](3 - n, 4)
        ),
        4,
        "refused",
    )
    for one, other in (
        ("torchrun", "slurm"),
        ("kubeflow", "tpu"),
        ("openmpi", "pmi"),
        ("openmpi", "slurm"),
        ("tpu", "jobset"),
    )
} | {
    "slurm, and another size": Case(
        lambda n: env.slurm(n, 4) | {"WORLD_SIZE": "2"}, 4, "refused"
    ),
}

NESTED = {
    "torchrun in srun": Case(lambda n: env.slurm(n // 4, 2) | env.torchrun(n, 8), 8),
    "torchrun in mpirun": Case(
        lambda n: env.openmpi(n // 4, 2) | env.torchrun(n, 8), 8
    ),
    "mpirun in a batch script": Case(lambda n: env.sbatch(8) | env.openmpi(n, 8), 8),
    "mpirun by srun": Case(lambda n: _daemons(n) | env.openmpi(n, 8), 8),
    "mpiexec by srun": Case(lambda n: _daemons(n) | env.pmi(n, 8), 8),
    "mpirun in an interactive step": Case(
        lambda n: env.slurm(0, 1) | env.openmpi(n, 8), 8
    ),
    "srun in mpirun": Case(
        lambda n: (
            env.openmpi(1, 2) | env.slurm(n, 4) | {"SLURM_TASK_PID": str(os.getpid())}
        ),
        4,
    ),
    "srun with PMI": Case(
        lambda n: env.slurm(n, 4) | {"PMI_RANK": str(n), "PMI_SIZE": "4"}, 4
    ),
    "torchrun of one in each task": Case(
        lambda n: env.slurm(n, 4) | env.torchrun(0, 1), 4
    ),
    "Ray Train in Kubernetes": Case(lambda n: env.tpu(3 - n, 4) | env.ray(n, 4), 4),
    "slices of TPUs in a JobSet": Case(
        lambda n: env.tpu_slices(n, 4) | env.jobset(n, 4), 4
    ),
    "Kubeflow by a JobSet": Case(lambda n: env.jobset(n, 4) | env.kubeflow(n, 4), 4),
    "replicator launch in srun": Case(
        lambda n: env.slurm(1, 2) | env.replicator(n, 4), 4
    ),
}

UNKNOWN = {
    "Vertex AI": Case(lambda n: env.vertex(n, 4), 4, "refused"),
    "TensorFlow's operators": Case(
        lambda n: {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}})},
        2,
        "refused",
    ),
    "SageMaker": Case(
        lambda _: {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"},
        2,
        "refused",
    ),
    "SkyPilot": Case(
        lambda n: {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": str(n)},
        4,
        "refused",
    ),
    "torchrun of one on each host of SkyPilot": Case(
        lambda n: {"SKYPILOT_NUM_NODES": "4"} | env.torchrun(0, 1), 4, "refused"
    ),
    "torchrun on the hosts of SkyPilot": Case(
        lambda n: {"SKYPILOT_NUM_NODES": "2"} | env.torchrun(n, 8), 8
    ),
    "a process for each chip of one TPU host": Case(
        lambda n: {
            "CLOUD_TPU_TASK_ID": str(n),
            "TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477",
        },
        2,
    ),
}

ALONE = {
    "a laptop": Case(lambda _: {}, 1, "alone"),
    "pods of an indexed Job": Case(
        lambda n: {"JOB_COMPLETION_INDEX": str(n)}, 4, "alone"
    ),
    "a batch script": Case(lambda _: env.sbatch(4), 1, "alone"),
    "a shell that knows PyTorch": Case(
        lambda _: {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}, 1, "alone"
    ),
    "one host of TPUs": Case(lambda _: env.tpu(0, 1), 1, "alone"),
    "one host of TPUs at Kaggle": Case(
        lambda _: env.tpu(0, 1) | {"TPU_PROCESS_ADDRESSES": "local"}, 1, "alone"
    ),
    "an interactive step": Case(
        lambda _: env.sbatch(8) | env.slurm(0, 1) | {"SLURM_NTASKS": "8"}, 1, "alone"
    ),
    "one replica of Vertex AI": Case(lambda _: env.vertex(0, 1), 1, "alone"),
    "one host of SageMaker": Case(lambda _: {"SM_HOSTS": '["algo-1"]'}, 1, "alone"),
    "TensorFlow's operator with a process that trains alone": Case(
        lambda n: env.vertex(n, 4) | {"REPLICATOR_NUM_PROCESSES": "1"}, 4, "alone"
    ),
    "one of one": Case(lambda _: {"WORLD_SIZE": "1"}, 1, "alone"),
    "tasks by our own variable": Case(
        lambda n: env.slurm(n, 4) | {"REPLICATOR_NUM_PROCESSES": "1"}, 4, "alone"
    ),
}

CASES: dict[str, Case] = WHOLE | HALF | CONTRADICTORY | NESTED | UNKNOWN | ALONE
