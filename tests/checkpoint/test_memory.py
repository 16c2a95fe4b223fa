"""Memory does not grow from save to save, and a save holds few shards at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAVE = """
import ctypes, sys
from pathlib import Path
import jax.numpy as jnp
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.training.options import Retention

MIB = 1 << 20

def read(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) / 1024

state = {f"{n}": jnp.full((1024, 1024), n, jnp.float32) for n in range(16)}
with CheckpointStore(sys.argv[1], retention=Retention(keep_last=1)) as store:
    for step in range(1, 21):
        Path("/proc/self/clear_refs").write_text("5")
        before = read("VmRSS")
        store.save(Snapshot(step=step, arrays=state))
        peak = read("VmHWM") - before
        ctypes.CDLL(None).malloc_trim(0)  # gives back what nobody holds
        if step == 2:
            first = read("VmRSS")
    print(read("VmRSS") - first, peak)
"""


@pytest.mark.slow
def test_memory_after_twenty_saves_is_that_after_two(tmp_path):
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    grown, peak = map(float, done.stdout.split())
    assert grown < 4  # MiB
    assert peak < 1.25 * 64  # the copy of the state, and a few shards
