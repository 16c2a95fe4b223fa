"""Memory does not grow from save to save."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAVE = """
import ctypes, os, sys
from pathlib import Path
import jax.numpy as jnp
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.training.options import Retention

def held_mib():
    ctypes.CDLL(None).malloc_trim(0)  # gives back what nobody holds
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

state = {f"{n}": jnp.full((1024, 1024), n, jnp.float32) for n in range(4)}
with CheckpointStore(sys.argv[1], retention=Retention(keep_last=1)) as store:
    for step in range(1, 21):
        store.save(Snapshot(step=step, arrays=state))
        if step == 2:
            first = held_mib()
    print(held_mib() - first)
"""


@pytest.mark.slow
def test_memory_after_twenty_saves_is_that_after_two(tmp_path):
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert float(done.stdout) < 12  # MiB, for all; the state has 16, at each save
