"""Start real processes that make up one JAX program, bounded, and leave none behind."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from replicator.distributed.processes.ports import free_port

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 600.0
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of one process.

    Attributes:
      code: Its exit status; negative for a signal.
      output: Standard output and error.
      value: What the program returned; None if it did not come so far.
    """

    code: int
    output: str
    value: Any


def run_processes(program, tmp_path, *, processes, devices, is_late=None, **arguments):
    """Run `program(**arguments)` in each of n processes; return how each ended.

    Once one has died by a signal the others are killed: they would wait for it.

    Args:
      program: A function of a module, which the processes import.
      tmp_path: For results; a new folder in it for each call.
      processes: How many.
      devices: Fake devices of each process.
      is_late: Whether all are to be killed now, and the test to fail; by default
        after a time.
      arguments: JSON.
    """
    folder = Path(tmp_path) / f"processes-{time.monotonic_ns()}"
    folder.mkdir()
    port = free_port()
    group = [
        _start(program, arguments, folder, (rank, processes, devices, port))
        for rank in range(processes)
    ]
    until_s = time.monotonic() + _TIMEOUT_S
    try:
        late = _wait(group, is_late or (lambda: time.monotonic() > until_s))
    finally:
        for process in group:
            kill(process)
    ended = [_ended(process, folder, rank) for rank, process in enumerate(group)]
    told = "\n".join(f"--- process {i}\n{each.output}" for i, each in enumerate(ended))
    assert not late, f"processes {late} did not end in time\n{told}"
    return ended


def values(ended):
    """Return the results of processes that all must have succeeded."""
    told = "\n".join(f"--- process {i}\n{each.output}" for i, each in enumerate(ended))
    assert all(each.code == 0 for each in ended), told
    return [each.value for each in ended]


def assert_killed(ended):
    """Assert that no process came to its end, and that one at least was killed.

    The others may have aborted first: JAX ends the peers of a process that died.
    """
    told = "\n".join(f"--- process {i}\n{each.output}" for i, each in enumerate(ended))
    codes = [each.code for each in ended]
    assert -signal.SIGKILL in codes, told
    assert all(codes), told


def kill(process):
    """Kill a process and its children, which are a process group of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop(process):
    """Stop the child, and wait until it stands still: it runs on for a while after."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def _start(program, arguments, folder, place):
    rank = place[0]
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.multiprocess.processes",
                f"{program.__module__}:{program.__name__}",
                json.dumps(arguments, default=str),
                str(folder / f"{rank}.pickle"),
                *map(str, place),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "NPROC": "16"},
            start_new_session=True,
        )


def _wait(group, is_late):
    """Wait until all have ended or one was killed; return who had not in time."""
    while any(process.poll() is None for process in group):
        if any((process.poll() or 0) < 0 for process in group):
            return []
        if is_late():
            return [i for i, process in enumerate(group) if process.poll() is None]
        time.sleep(_POLL_S)
    return []


def _ended(process, folder, rank):
    result = folder / f"{rank}.pickle"
    return Ended(
        code=process.returncode,
        output=(folder / f"{rank}.log").read_text(errors="replace"),
        value=pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def _main(name, arguments, result, rank, processes, devices, port):
    import importlib

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # More than one step in flight hangs several devices over gloo.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if int(processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address,
            int(processes),
            int(rank),
            initialization_timeout=100,
            coordinator_bind_address=address,
        )
    module, _, function = name.partition(":")
    value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    draft = Path(result).with_suffix(".draft")
    draft.write_bytes(pickle.dumps(value))
    draft.rename(result)


if __name__ == "__main__":
    _main(*sys.argv[1:])
