"""Start two processes by a real launcher, or by its variables."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.launchers import environments as env
from replicator.distributed.processes.ports import free_port

TIMEOUT_S = 150.0
_TRAIN = [sys.executable, "-m", "benchmarks.launchers.train"]
_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def reference() -> Sequence[str]:
    """Return the command by which all others are judged."""
    command = [sys.executable, "-m", "replicator", "launch", "--processes", "2"]
    return [*command, "-m", "benchmarks.launchers.train"]


def real_launchers(torchrun: str | None) -> dict[str, Sequence[str]]:
    """Return the commands of the launchers that are on this machine, by name.

    Args:
      torchrun: Its path, in whatever environment; None where there is none.
    """
    found: dict[str, Sequence[str]] = {}
    if mpirun := shutil.which("mpirun.openmpi") or shutil.which("mpirun"):
        found["openmpi"] = [mpirun, "--oversubscribe", "-n", "2", *_TRAIN]
    if mpiexec := shutil.which("mpiexec.mpich") or shutil.which("mpiexec.hydra"):
        found["pmi"] = [mpiexec, "-n", "2", *_TRAIN]
    if srun := shutil.which("srun"):
        found["slurm"] = [srun, "--ntasks", "2", *_TRAIN]
    if torchrun:
        options = ["--standalone", "--nproc-per-node", "2", "--no-python"]
        found["torchrun"] = [torchrun, *options, *_TRAIN]
    with contextlib.suppress(ImportError):
        import ray.train  # noqa: F401  # pyright: ignore

        ray_driver = [sys.executable, "-m", "benchmarks.launchers.ray_driver"]
        found["ray"] = ray_driver
        found["jax by JaxTrainer"] = [*ray_driver, "jax"]
    return found


def stand_ins() -> dict[str, Callable[[int, int], Mapping[str, str]]]:
    """Return the variables of each launcher, with this host in place of its hosts."""
    here = f"localhost:{free_port()}"
    port = here.rpartition(":")[2]
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    slurm = {"SLURM_STEP_NODELIST": "localhost"}
    return {
        "kubeflow": lambda n, size: (
            env.kubeflow(n, size) | {"JAX_COORDINATOR_ADDRESS": here}
        ),
        "torchrun": lambda n, size: env.torchrun(n, size) | own,
        "openmpi": env.openmpi,
        "pmi": env.pmi,
        "tpu": lambda n, size: (
            env.tpu(n, size) | {"TPU_WORKER_HOSTNAMES": "localhost,localhost"}
        ),
        "jobset": lambda n, size: (
            env.jobset(n, size) | {"JOBSET_COORDINATOR": "localhost"}
        ),
        "slurm": lambda n, size: env.slurm(n, size) | slurm,
        "jax": lambda n, size: (
            env.replicator(n, size) | {"REPLICATOR_COORDINATOR": here}
        ),
    }


def trained(command: Sequence[str]) -> list[dict]:
    """Run a launcher; return the results of its processes, none if it fails."""
    with _started(command, {}) as process:
        return _results(process)


def trained_by_hand(kind: str, environ: Callable[[int, int], Mapping]) -> list[dict]:
    """Start two processes with the variables of a launcher; return their results."""
    command = [*_TRAIN, "jax"] if kind == "jax" else _TRAIN
    with contextlib.ExitStack() as stack:
        if kind == "torchrun":  # its agent has the port for the whole run
            port = int(environ(0, 2)["MASTER_PORT"])
            stack.enter_context(socket.create_server(("localhost", port)))
        started = [
            stack.enter_context(_started(command, environ(n, 2))) for n in range(2)
        ]
        return [line for process in started for line in _results(process)]


@contextlib.contextmanager
def _started(
    command: Sequence[str], environ: Mapping[str, str]
) -> Iterator[subprocess.Popen]:
    """Start a command in a session of its own, of which nothing is left."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **_MPI, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _results(process: subprocess.Popen) -> list[dict]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        print(f"nothing after {TIMEOUT_S:g} s: {late.output}", file=sys.stderr)
        return []
    lines = [line.partition("trained ")[2] for line in output.splitlines()]
    if process.returncode != 0:
        print(output, file=sys.stderr)
        return []
    return [json.loads(line) for line in lines if line.startswith("{")]
