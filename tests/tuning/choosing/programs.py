"""What each process of `test_processes` runs."""

import os

import jax

from replicator import Replicator
from replicator.strategies.calibration import Calibration, keep_calibration
from tests.multiprocess.programs import global_batches
from tests.tuning.choosing.subjects import plain


def chosen(calibrated=None, folder=""):
    """Train under the strategy that a run chooses; return what it decided by.

    Args:
      calibrated: Process that has measured its devices, if any.
      folder: Folder of its caches.
    """
    if calibrated is not None:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/{jax.process_index()}"
        os.makedirs(os.environ["XDG_CACHE_HOME"], mode=0o700)
    if calibrated == jax.process_index():
        found = Calibration(
            device_kind="cpu",
            devices=jax.local_device_count(),
            flops_per_s={"float32": 1e9},
            memory_bytes_per_s=1e10,
            host_bytes_per_s=1e9,
        )
        assert keep_calibration(found)
    rep = Replicator(strategy="auto", compilation_cache=False)
    step_fn, init_fn, _ = plain(rep)
    result = rep.run(step_fn, global_batches(), init_fn=init_fn, steps=2, display=False)
    record = rep.decision.record
    names = ("name", "status", "seconds", "predicted_s")
    found = [{name: each[name] for name in names} for each in record["candidates"]]
    return {"chosen": record["chosen"], "found": found, "step": result.step}
