"""Eight fake CPU devices, strict types, and the fixtures that every test may use."""

import os
import signal

# Before JAX starts: the CPU pool must hold a thread per fake device (facts: a smaller
# pool can deadlock on a collective).
os.environ.setdefault("NPROC", "16")

import jax
import pytest

from replicator.mesh import replica_mesh

# A shell's background job ignores Ctrl-C, and all that it starts would.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def mesh():
    return replica_mesh(8)
