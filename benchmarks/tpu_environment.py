"""Environment of a process that compiles for TPUs on a host without one."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def is_installed() -> bool:
    """Return whether there is a compiler for TPUs: libtpu."""
    return importlib.util.find_spec("libtpu") is not None


def tpu_environment() -> dict[str, str]:
    """Return the environment in which JAX names topologies of TPUs."""
    return os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two such processes at once
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_LIBRARY_PATH": importlib.import_module("libtpu").get_library_path(),
        "TPU_SKIP_MDS_QUERY": "1",  # there is no TPU to ask who it is
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


def run_for_tpus(module: str, arguments: Sequence[str] = ()) -> Any:
    """Run a module in a process of its own, in that environment, and print its lines.

    Returns:
      Its last line, which is JSON and not printed.

    Raises:
      subprocess.CalledProcessError: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=tpu_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *lines, found = done.stdout.splitlines()
    print(*lines, sep="\n")
    return json.loads(found)
