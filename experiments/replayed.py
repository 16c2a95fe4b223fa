"""Act, insert, sample and learn in turn: an agent with a replay table in one process.

The table and the items are those of a program. A turn makes `steps_per_call` updates
by one compiled call; their priorities are given back before the next turn.
"""

import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicator
import replicator.launchpad_bridge as lp
from experiments import run_folder
from experiments.off_policy import OffPolicy
from experiments.returns import Learned, Returns
from replicator.launchpad_bridge import acting


def learn(
    rep: replicator.Replicator,
    agent: OffPolicy,
    environment: acting.VectorEnvironment,
    table: lp.ReplayTable,
    *,
    items: acting.Items,
    batch_size: int,
    unroll_length: int,
    steps: int,
    steps_per_call: int,
    least: int,
    minutes: float = math.inf,
    seed: int = 0,
    folder: Path | None = None,
    saved_every_s: float = run_folder.SAVED_EVERY_S,
    **session: Any,
) -> Learned:
    """Run an agent until it has made its updates, from its last checkpoint on.

    What is in the table is not in the checkpoint: a second sitting fills it anew.

    Args:
      rep: Where it learns.
      agent: What acts and learns.
      environment: Where it acts.
      table: What it keeps.
      items: Makes the table's rows of unrolls.
      batch_size: Rows that an update learns from.
      unroll_length: Steps of each environment in a turn.
      steps: Updates in all.
      steps_per_call: Updates in a turn.
      least: Rows in the table before the first update.
      minutes: After which the sitting ends.
      seed: Of everything.
      folder: Where returns and checkpoints are kept; None keeps nothing.
      saved_every_s: From one checkpoint to the next.
      **session: Of the session: `directory`, and others.
    """
    began = time.perf_counter()
    act = acting.LocalInference(agent.policy, seed=seed, index=0)
    with rep.session(
        agent.step_fn,
        init_fn=agent.init_fn,
        steps=steps,
        steps_per_call=steps_per_call,
        seed=seed,
        display=False,
        **run_folder.saved_in(folder, seconds=saved_every_s),
        **session,
    ) as opened:
        begun = opened.steps_done
        returns = Returns(folder, updates=begun)
        state = acting.start(
            environment, agent.initial_core, seed=acting.environment_seed(seed, begun)
        )
        waiting: Any = None

        def play(update: int) -> int:
            nonlocal state, waiting
            unrolled = acting.unroll(environment, act, state, unroll_length)
            assert unrolled is not None  # nothing stops it
            state = unrolled.acting
            returns.add(update, unrolled.episodes)
            rows, waiting = items(unrolled.trajectories, waiting, ends=False)
            if rows is not None:
                table.insert(rows, actor="actor/0", version=update)
            return 0 if rows is None else len(rows["reward"])

        def follow() -> None:
            # Copied: the next step is given the memory of this state.
            act.use({"params": jax.tree.map(jnp.copy, opened.state["params"])})

        follow()
        held = 0
        while held < least:
            held += play(begun)
        for update in opened.steps():
            taken = table.take(batch_size * steps_per_call, timeout_s=60)
            assert taken is not None  # rows are there
            given = opened.step(batches_of(taken, steps_per_call))
            # Acts while the devices learn, by the policy of the turn before.
            play(update - 1)
            follow()
            assert taken.keys is not None, "of a replay table"
            table.update_priorities(taken.keys, np.ravel(given["priority"]))
            if time.perf_counter() - began > 60 * minutes:
                break
    return Learned(
        params=jax.device_get(opened.result.state["params"]),
        updates=opened.result.step,
        begun=begun,
        returns=returns.episodes,
        seconds=time.perf_counter() - began,
    )


def batches_of(taken: Any, count: int) -> dict[str, Any]:
    """Return a sample as the batches of so many updates, leaves [count, rows, ...]."""
    batch = {
        "trajectories": taken.trajectories,
        "probability": taken.probabilities.astype(np.float32),
    }
    return jax.tree.map(
        lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]) if count > 1 else leaf,
        batch,
    )
