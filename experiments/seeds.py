"""Runs of one agent, seed after seed: each goes on after a kill, and all are told of.

What a seed's run has learned is kept in the folder of the experiment until all seeds
have ended; what is left then are pictures, and the next run begins anew.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

import replicator
from experiments import run_folder
from experiments.agent import Agent
from experiments.returns import Returns
from replicator.launchpad_bridge import acting

LAST = 100  # episodes, over which returns are averaged
_SAVED_EVERY_S = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed led to.

    Attributes:
      returns: (updates so far, return) of each episode, in order.
      seconds: From the beginning of this sitting to the last update, compilation
        included.
      params: At the end.
    """

    returns: list[tuple[int, float]]
    seconds: float
    params: Any

    @property
    def average_return(self) -> float:
        """Of the last episodes."""
        return float(np.mean([gained for _, gained in self.returns[-LAST:]]))


def folder_of(config: Any, seed: int) -> Path | None:
    """Return where a seed's run is kept; None if nothing is."""
    return Path(config.directory) / f"seed-{seed}" if config.directory else None


def saved_in(folder: Path | None) -> dict[str, Any]:
    """Return what the session of a seed is told to be saved."""
    return run_folder.saved_in(folder, seconds=_SAVED_EVERY_S)


def run_in_turn(
    rep: replicator.Replicator,
    agent: Agent,
    environment: acting.VectorEnvironment,
    *,
    steps: int,
    unroll_length: int,
    seed: int,
    folder: Path | None,
) -> Outcome:
    """Act, then learn from it, and so on: one process, and no program."""
    began = time.perf_counter()
    act = acting.LocalInference(agent.policy, seed=seed, index=0)
    with rep.session(
        agent.step_fn,
        init_fn=agent.init_fn,
        steps=steps,
        seed=seed,
        display=False,
        **saved_in(folder),
    ) as session:
        begun = session.steps_done
        returns = Returns(folder, updates=begun)
        # Another beginning at each sitting: environments are not in the checkpoint.
        state = acting.start(
            environment,
            agent.initial_core,
            seed=acting.environment_seed(seed, begun),
            steps=begun * unroll_length,
        )
        for update in session.steps():
            act.use({"params": session.state["params"]})
            unrolled = acting.unroll(environment, act, state, unroll_length)
            assert unrolled is not None  # nothing stops it
            state = unrolled.acting
            returns.add(update, unrolled.episodes)
            session.step(unrolled.trajectories)
    return Outcome(
        returns=returns.episodes,
        seconds=time.perf_counter() - began,
        params=jax.device_get(session.result.state["params"]),
    )


def run_all(
    config: Any, run: Callable[[int], Outcome], *, free: Collection[str]
) -> dict[int, Outcome]:
    """Run one seed after the other, and say how each went.

    Args:
      config: Of the experiment, with `seeds`, `first_seed`, `steps` and `directory`.
      run: Runs a seed.
      free: As of `run_folder.claim`.

    Raises:
      ArgumentError: The folder is that of a run with other settings.
    """
    if config.directory:
        run_folder.claim(config.directory, config, free=free)
    outcomes = {}
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        outcomes[seed] = found = run(seed)
        print(
            f"seed {seed}: return {found.average_return:.2f} after {config.steps} "
            f"updates, {len(found.returns)} episodes, {found.seconds:.1f} s",
            flush=True,
        )
    return outcomes


def tell(config: Any, outcomes: dict[int, Outcome], *, replicas: int) -> None:
    """Print the last line, and let the next run begin anew."""
    worst = min(each.average_return for each in outcomes.values())
    found = {
        "average_return": worst,
        "seconds": max(each.seconds for each in outcomes.values()),
        "scale": config.scale,
        "replicas": replicas,
        "steps": config.steps,
    }
    print(json.dumps(found), flush=True)
    if config.directory:
        for seed in outcomes:
            shutil.rmtree(Path(config.directory) / f"seed-{seed}")
        run_folder.release(config.directory)
