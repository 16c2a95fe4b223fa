"""Act, then learn from it, and so on: an agent in one process, and no program."""

import math
import time
from pathlib import Path
from typing import Any

import jax

import replicator
from experiments import run_folder
from experiments.agent import Agent
from experiments.returns import Learned, Returns
from replicator.launchpad_bridge import acting


def learn(
    rep: replicator.Replicator,
    agent: Agent,
    environment: acting.VectorEnvironment,
    *,
    batch_size: int,
    unroll_length: int,
    steps: int,
    minutes: float = math.inf,
    seed: int = 0,
    folder: Path | None = None,
    saved_every_s: float = run_folder.SAVED_EVERY_S,
    **session: Any,
) -> Learned:
    """Run an agent until it has made its updates, from its last checkpoint on.

    Args:
      rep: Where it learns.
      agent: What acts and learns.
      environment: Where it acts.
      batch_size: Trajectories that an update learns from: all that are made at once, or
        a part, so that the last of them come from a policy some updates older.
      unroll_length: Steps of a trajectory.
      steps: Updates in all.
      minutes: After which the sitting ends.
      seed: Of everything.
      folder: Where returns and checkpoints are kept; None keeps nothing.
      saved_every_s: From one checkpoint to the next.
      **session: Of the session: `directory`, and others.
    """
    began = time.perf_counter()
    act = acting.LocalInference(agent.policy, seed=seed, index=0)
    with rep.session(
        init_fn=agent.init_fn,
        steps=steps,
        seed=seed,
        display=False,
        **run_folder.saved_in(folder, seconds=saved_every_s),
        **session,
    ) as opened:
        step, begun = opened.compile(agent.step_fn), opened.steps_done
        returns = Returns(folder, updates=begun)
        # Another beginning at each sitting: environments are not in the checkpoint.
        state = acting.start(
            environment,
            agent.initial_core,
            seed=acting.environment_seed(seed, begun),
            steps=begun * unroll_length,
        )
        batches: list[Any] = []
        for update in opened.steps():
            if not batches:
                act.use({"params": opened.state["params"]})
                unrolled = acting.unroll(environment, act, state, unroll_length)
                assert unrolled is not None  # nothing stops it
                state = unrolled.acting
                returns.add(update, unrolled.episodes)
                batches = cut(unrolled.trajectories, batch_size)
            metrics = step(batches.pop(0)) | returns.metrics()
            opened.after(metrics, examples=batch_size * unroll_length)
            if time.perf_counter() - began > 60 * minutes:
                break
    return Learned(
        params=jax.device_get(opened.result.state["params"]),
        updates=opened.result.step,
        begun=begun,
        returns=returns.episodes,
        seconds=time.perf_counter() - began,
    )


def cut(trajectories: Any, size: int) -> list[Any]:
    """Return batches of so many trajectories each."""
    rows = len(trajectories["action"])
    return [
        jax.tree.map(lambda leaf, i=i: leaf[i : i + size], trajectories)
        for i in range(0, rows, size)
    ]
