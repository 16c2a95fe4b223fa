"""Environment of a process that compiles for TPUs on a host without one."""

import importlib
import importlib.util
import os


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
