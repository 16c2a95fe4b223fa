"""One of several processes of a whole run that is saved, and broken as told.

    python -m tests.multiprocess.run_worker PORT COUNT RANK DIRECTORY FAULTS

Prints each step, and a hash of the final parameters, if it comes so far.
"""

import hashlib
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from replicator import Replicator
from replicator.testing import faults
from replicator.training.watchdog import Limits
from tests.multiprocess.groups import die_with_parent
from tests.multiprocess.loop_worker import Announce
from tests.steps import regression_batch, trainer


def main(port, count, rank, directory, schedule):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(rank))
    directory = Path(directory)
    broken = faults.Injector(faults.parse(schedule), journal=directory / "faults.jsonl")
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    try:
        result = rep.run(
            step_fn,
            broken.dataset([regression_batch(seed=seed) for seed in range(5)]),
            init_fn=init_fn,
            steps=1500,
            checkpoint_dir=directory / "saved",
            checkpoint_every=10_000,
            hooks=[broken, Announce()],
            step_timeout=Limits(step_s=60, report_s=8),
            display=False,
        )
    finally:
        print("finally", flush=True)
    leaves = jax.tree.leaves(jax.device_get(result.state))
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    print("ended", result.step, hashlib.sha256(bits).hexdigest(), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
