"""Be RLlib's IMPALA, in the virtual environment that `rllib` made; no JAX in it.

`python -m benchmarks.actor_learner.rllib_peer SETUP` writes `ready` once it learns,
then reads lines of seconds, and answers each with the environment steps that were
learnt from, the seconds it took, and the processor time of all its processes.

What learns is RLlib's default module with the network's sizes; it takes bytes, as ours
does, and makes numbers between 0 and 1 of them where it runs. Given to RLlib as floats,
its usual way, observations are four times as large.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch  # pyright: ignore[reportMissingImports]
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import (
    DefaultPPOTorchRLModule,
)
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import register_env

from benchmarks.actor_learner.counters import processor_s_below
from benchmarks.actor_learner.pong import Pong

_WARM_UPDATES = 6
_ITERATION_S = 2  # of `train`, after which it gathers its metrics


class FromBytes(DefaultPPOTorchRLModule):
    """The default module, of observations between 0 and 255."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return super()._forward(_scaled(batch), **kwargs)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return super()._forward_train(_scaled(batch), **kwargs)

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        """Return values, as the base does."""
        if embeddings is None:
            batch = _scaled(batch)
        return super().compute_values(batch, embeddings)


def make_algorithm(setup: dict[str, Any]) -> Algorithm:
    """Return IMPALA, as large as `setup` says: fields of `Setup`."""
    model = DefaultModelConfig(
        conv_filters=[(16, 8, 4), (32, 4, 2)],
        conv_activation="relu",
        head_fcnet_hiddens=[256],
        head_fcnet_activation="relu",
        vf_share_layers=True,
    )
    steps = setup["batch_size"] * setup["unroll_length"]
    config = (
        IMPALAConfig()
        .environment("pong")
        .env_runners(
            num_env_runners=setup["actors"],
            num_envs_per_env_runner=setup["environments"],
            rollout_fragment_length=setup["unroll_length"],
            sample_timeout_s=600,
        )
        .learners(num_learners=0)
        .rl_module(
            rl_module_spec=RLModuleSpec(module_class=FromBytes, model_config=model)
        )
        .training(train_batch_size_per_learner=steps, grad_clip=40.0, lr=6e-4)
        .reporting(
            min_time_s_per_iteration=_ITERATION_S, min_sample_timesteps_per_iteration=0
        )
    )
    return config.build_algo()


def trained(result: dict[str, Any]) -> int | None:
    """Return the environment steps that were learnt from by now; None: not said."""
    modules = result.get("learners", {}).get("__all_modules__", {})
    return modules.get("num_env_steps_trained_lifetime")


def train_until(algorithm: Algorithm, ends: Callable[[int], bool]) -> tuple[float, int]:
    """Train until `ends(steps)` at the end of an update; return when, and the steps."""
    while True:
        steps = trained(algorithm.train())
        if steps is not None and ends(steps):
            return time.monotonic(), int(steps)


def _scaled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "obs": batch["obs"].float() / 255.0}


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # Actors of Ray import this module, and the environment, from here.
    root = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=setup["actors"] + 2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    register_env("pong", lambda _: Pong())
    algorithm = make_algorithm(setup)
    per_update = setup["batch_size"] * setup["unroll_length"]
    train_until(algorithm, lambda steps: steps >= _WARM_UPDATES * per_update)
    print("ready", flush=True)
    for line in sys.stdin:
        # It has waited for this line: what lay ready for it is not of this window.
        _, least = train_until(algorithm, lambda steps: True)
        least += 2 * per_update
        begun_s, begun = train_until(algorithm, lambda steps, n=least: steps >= n)
        used_s = processor_s_below(os.getpid())
        until_s = begun_s + float(line)
        ended_s, ended = train_until(
            algorithm,
            lambda steps, at_s=until_s, n=begun: time.monotonic() >= at_s and steps > n,
        )
        used_s = processor_s_below(os.getpid()) - used_s
        answer = {"trained": ended - begun, "seconds": ended_s - begun_s}
        print(json.dumps(answer | {"processor_s": used_s}), flush=True)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
