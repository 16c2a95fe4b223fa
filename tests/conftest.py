"""Eight fake CPU devices, strict types, and the fixtures that every test may use."""

import gc
import os
import re
import signal
import tempfile

# Before JAX starts: the CPU pool must hold a thread per fake device (facts: a smaller
# pool can deadlock on a collective).
os.environ.setdefault("NPROC", "16")
# A run under a strategy would compile its step once more: who tests that asks for it.
os.environ.setdefault("REPLICATOR_CHECK_FIRST_UPDATES", "0")

import jax
import pytest

from replicator.base.mesh import replica_mesh
from replicator.engine.replicated import ReplicatedLayout

# A shell's background job ignores Ctrl-C, one under `nohup` SIGHUP, and all that it
# starts would.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hundreds of runs compile the same few programs: once each is enough.
_PROGRAMS = tempfile.TemporaryDirectory(prefix="programs-")
jax.config.update("jax_compilation_cache_dir", _PROGRAMS.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    # A local Ray takes seconds to start, each time, and SLURM's steps too; Launchpad's
    # own examples are downloaded. A slow run has forty minutes.
    for item in items:
        parameters = set(re.split(r"[\[\]-]", item.name)[1:])
        if item.get_closest_marker("slow") and (
            parameters & {"ray", "slurm"}
            or item.path.name in ("test_program_ray.py", "test_examples.py")
        ):
            item.add_marker("nightly")


def pytest_unconfigure():
    _PROGRAMS.cleanup()


@pytest.fixture(scope="module")
def quick_collections():
    """Let `gc.collect` look through this file's objects alone: jax's are millions.

    Once for the whole run would not do. What the files between leave behind is as much,
    and a test that freezes objects for itself thaws all of them.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def mesh():
    return replica_mesh(8)


@pytest.fixture
def layout(mesh):
    return ReplicatedLayout(mesh)
