"""Train by two workers of Ray Train's `JaxTrainer`: `ray_driver.py [jax]`.

On CPUs it joins its workers by JAX's own `initialize` only when it believes in GPUs
(`jax`); else they are workers of Ray alone.
"""

import logging
import os
import sys
import tempfile

import ray
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig

from benchmarks.launchers.train import train


def loop() -> None:
    ray_train.report(train())


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="launchers-") as folder:
        trainer = JaxTrainer(
            loop,
            jax_config=JaxConfig(use_gpu="jax" in sys.argv[1:]),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    main()
