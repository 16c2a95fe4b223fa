"""Variables of process `number` of `size` under each launcher, as it documents them."""

import json


def replicator(number, size):
    return {
        "REPLICATOR_COORDINATOR": "10.0.0.1:5000",
        "REPLICATOR_NUM_PROCESSES": str(size),
        "REPLICATOR_PROCESS_ID": str(number),
    }


def ray(number, size):
    return {
        "ray.train:world_rank": str(number),
        "ray.train:world_size": str(size),
        "ray.train:coordinator": "10.0.0.9:4000",
    }


def kubeflow(number, size):
    return {
        "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666",
        "JAX_COORDINATOR_PORT": "6666",
        "JAX_NUM_PROCESSES": str(size),
        "JAX_PROCESS_ID": str(number),
        "JAX_DISTRIBUTED_BACKEND": "gloo",
    }


def pytorch(number, size):
    """Set by hand, or by an operator that starts no torchrun."""
    return {
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "RANK": str(number),
        "WORLD_SIZE": str(size),
    }


def torchrun(number, size, *, run="b7", restarts=0):
    return pytorch(number, size) | {
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def openmpi(number, size):
    """Open MPI 4 with all processes on one host."""
    return {
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "PMIX_NAMESPACE": "1531576321",
        "PMIX_RANK": str(number),
    }


def pmi(number, size):
    """MPICH's and Intel's `mpiexec` with all processes on one host."""
    return {
        "PMI_RANK": str(number),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(number),
        "MPI_LOCALNRANKS": str(size),
    }


def tpu(number, size):
    """As GKE's webhook sets it."""
    hosts = [f"train-{host}.train" for host in range(size)]
    return {
        "TPU_WORKER_ID": str(number),
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
    }


def tpu_slices(number, size):
    """As GKE's webhook sets it for a JobSet of two slices."""
    return tpu(number % (size // 2), size // 2) | {
        "MEGASCALE_COORDINATOR_ADDRESS": "train-slice-0-0.train:8080",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": str(number // (size // 2)),
    }


def jobset(number, size):
    """As `docs/manifests/jobset.yaml` hands it on, with two Jobs."""
    return {
        "JOBSET_COORDINATOR": "train-workers-0-0.train",
        "JOBSET_JOBS": "2",
        "JOBSET_JOB_INDEX": str(number // (size // 2)),
        "JOBSET_PODS_PER_JOB": str(size // 2),
        "JOB_COMPLETION_INDEX": str(number % (size // 2)),
    }


def slurm(number, size):
    """As `srun` sets it for each task."""
    return {
        "SLURM_JOB_ID": "1000",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[007-010,20]",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
    }


def sbatch(size, nodes="node[007-010,20]"):
    """Return the variables of a batch script, before `srun` or `mpirun`."""
    return {
        "SLURM_JOB_ID": "1000",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }


def vertex(number, size):
    """As Vertex AI sets it, with one replica in the first pool and all others next."""
    hosts = [f"host-{host}:2222" for host in range(size)]
    pools = {"workerpool0": hosts[:1], "workerpool1": hosts[1:]}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"index": number}})}


LAUNCHERS = {
    "replicator": replicator,
    "ray": ray,
    "kubeflow": kubeflow,
    "torchrun": pytorch,
    "openmpi": openmpi,
    "pmi": pmi,
    "tpu": tpu,
    "jobset": jobset,
    "slurm": slurm,
}
"""By the name of the row that finds it."""
