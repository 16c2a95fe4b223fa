"""Train by two workers of Ray Train's `JaxTrainer`: `ray_driver.py [jax]`.

On CPUs it joins its workers by JAX's own `initialize` only when it believes in GPUs
(`jax`); else they are workers of Ray alone.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig

from benchmarks.launchers.train import train


def loop(config: dict) -> None:
    """Train as one worker, and write the result to a file."""
    own = Path(config["folder"]) / f"worker-{get_context().get_world_rank()}"
    own.write_text(json.dumps(train()))


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="launchers-") as folder:
        JaxTrainer(
            loop,
            train_loop_config={"folder": folder},
            jax_config=JaxConfig(use_gpu="jax" in sys.argv[1:]),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        ray.shutdown()
        for worker in sorted(Path(folder).glob("worker-*")):
            print(f"trained {worker.read_text()}")


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    main()
