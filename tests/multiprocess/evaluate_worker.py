"""One of several processes of a run that evaluates for long.

python -m tests.multiprocess.evaluate_worker PORT COUNT RANK DIRECTORY BATCHES EVERY
"""

import sys
from pathlib import Path

import jax
import optax

from replicator import Replicator
from tests.multiprocess.groups import die_with_parent
from tests.steps import regression_batch, trainer


def squares(state, batch):
    return {"loss": (batch["x"] @ state["params"]["w1"].sum(1) - batch["y"]) ** 2}


def main(port, count, rank, directory, batches, every):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(rank))
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def evaluation(context):
        for number in range(int(batches)):
            if number == 100:
                print("evaluates", flush=True)
            yield regression_batch(64, seed=number)

    result = rep.run(
        step_fn,
        [regression_batch(seed=seed) for seed in range(5)],
        init_fn=init_fn,
        steps=6,
        directory=Path(directory) / "told",
        checkpoint_dir=Path(directory) / "saved",
        checkpoint_every=100,
        eval_fn=squares,
        eval_dataset=evaluation,
        eval_every=int(every),
        display=False,
    )
    print("ended", result.step, result.evaluation["examples"], flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
