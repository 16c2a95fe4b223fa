"""Fault 6 on a disk that is really full: a small one, in a namespace of its own."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

PROGRAM = """
    import contextlib, logging, pathlib, subprocess, sys, threading, time
    import jax.numpy as jnp
    from replicator.checkpoint import CheckpointStore
    from replicator.hooks import Hook
    from replicator.training.options import Retention
    from tests.steps import regression_batch, replicas

    disk = pathlib.Path(sys.argv[1])
    options = ["-t", "tmpfs", "-o", "size=9m", "none", str(disk)]
    subprocess.run(["mount", *options], check=True)
    directory, filler = disk / "checkpoints", disk / "filler"
    warned = threading.Event()

    class Listen(logging.Handler):
        def emit(self, record):
            if "could not be saved, training goes on" in record.getMessage():
                warned.set()

    logging.getLogger("replicator.checkpoint").addHandler(Listen())

    class FillAndFree(Hook):
        def on_state(self, event):
            if event.step == 20:
                until_s = time.monotonic() + 60
                while not list(directory.glob("0*")):
                    assert time.monotonic() < until_s, "no checkpoint"
                    time.sleep(0.01)
                with contextlib.suppress(OSError), filler.open("wb", 0) as file:
                    while file.write(bytes(1 << 12)):
                        pass
            # A save gives way to one that still runs: the next is not far.
            elif filler.exists() and warned.wait(2):
                print("kept", CheckpointStore(directory).restore().damaged)
                print("left", [path.name for path in directory.glob(".writing-*")])
                filler.unlink()
                print("free", flush=True)

    def step_fn(state, batch):
        return {"big": state["big"] + 1}, {}

    result = replicas(1).run(
        step_fn,
        [regression_batch()],
        init_fn=lambda key: {"big": jnp.zeros(500_000)},
        steps=40,
        checkpoint_dir=directory,
        checkpoint_every=1,
        retention=Retention(keep_last=1),
        hooks=[FillAndFree()],
        display=False,
    )
    store = CheckpointStore(directory)
    last = store.restore().arrays["user"]["big"][-1]
    print("ended", result.step, store.steps(), last)
"""


def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while(tmp_path):
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("a disk of one's own needs root and `unshare`")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(PROGRAM), tmp_path],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("mounts are not permitted here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "kept ()",
        "left []",
        "free",
        "ended 40 (40,) 40.0",
    ]
