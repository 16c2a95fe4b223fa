"""Run a module as one group of processes, and read what each of them measured."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_group(
    module: str,
    arguments: Sequence[str] = (),
    *,
    processes: int,
    devices: int,
    timeout_s: float = 600.0,
) -> list[Any]:
    """Run a module by `replicator launch`; show the lines of its first process.

    Args:
      module: Module that calls `replicator.distributed.initialize()`; the last line of
        each process is its result, as JSON.
      arguments: Its arguments.
      processes: Number of processes.
      devices: Fake CPU devices of each.
      timeout_s: Longest time of all of it, in seconds.

    Returns:
      The results, by process.

    Raises:
      SystemExit: A process failed; with all that they printed.
      subprocess.TimeoutExpired: It took longer.
    """
    command = [sys.executable, "-m", "replicator", "launch", "--max-restarts=0"]
    command += [f"--processes={processes}", f"--devices-per-process={devices}"]
    command += ["-m", module, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{module} ended with {done.returncode}\n{done.stdout}")
    lines: list[list[str]] = [[] for _ in range(processes)]
    for line in done.stdout.splitlines():
        label, _, text = line.partition("] ")
        lines[int(label.removeprefix("["))].append(text)
    for text in lines[0][:-1]:
        print(text)
    return [json.loads(own[-1]) for own in lines]
