"""Start JAX in a process of its own, add up numbers over all devices, say what it saw.

Starting an accelerator, or a collective over several, is what hangs or aborts on a
machine that is not well: here somebody waits for it, with a bound. The result is one
JSON line; see `Probe`.
"""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

import replicator
from replicator.base.host.compilation_cache import enable_compilation_cache
from replicator.base.mesh import replica_mesh
from replicator.engine.layout import EQUAL, examples
from replicator.engine.replicated import ReplicatedLayout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a fresh process saw.

    Attributes:
      platform: Of JAX's devices: cpu, gpu, tpu.
      kind: Of the first device.
      devices: How many.
      pool: Threads that XLA's CPU client has at most for them.
      asynchronous: Whether CPU computations return before they are done.
      total: What adding 1 over all devices gave.
      seconds: From the first look at the devices to that sum.
      cache_directory: Where compiled programs are kept; None for nowhere.
      cache_problem: Why they are not.
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


def probe(*, timeout_s: float) -> Probe:
    """Ask a new process what it sees.

    Args:
      timeout_s: How long it may take; then it is killed.

    Raises:
      TimeoutError: It took longer.
      RuntimeError: It ended with an error; its last line is told.
    """
    # A run that holds the GPU's memory must not be asked for most of it once more.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "replicator.cli.checks.probe"]
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
    devices = jax.devices()
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


def _add_over_devices() -> float:
    layout = ReplicatedLayout(replica_mesh())
    add = layout.spread(
        lambda ones: replicator.all_reduce(ones, op="sum"),
        inputs=(examples(),),
        outputs=EQUAL,
    )
    return float(jax.jit(add)(jnp.ones(layout.num_replicas))[0])


def _is_asynchronous() -> bool:
    # This setting, unlike others, is no attribute of `jax.config` (0.10 to 0.12).
    return jax.config.read("jax_cpu_enable_async_dispatch")  # pyright: ignore


def _last_error(stderr: str) -> str:
    told = [
        line for line in stderr.splitlines() if re.match(r"\S.*(Error|error)", line)
    ]
    return (told or stderr.splitlines() or [""])[-1].strip()


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(look())))
