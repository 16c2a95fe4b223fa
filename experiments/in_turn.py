"""Act, then learn from it, and so on: an agent in one process, and no program."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import replicator
from experiments import run_folder
from experiments.agent import Agent
from experiments.returns import Learned, Returns
from replicator.launchpad_bridge import acting
from replicator.training.session import Session


@dataclasses.dataclass(kw_only=True)
class Player:
    """Environments, what acts in them, and the returns of the episodes that ended."""

    environment: acting.VectorEnvironment
    act: acting.LocalInference
    state: acting.Acting
    unroll_length: int
    returns: Returns

    def follow(self, session: Session) -> None:
        """Act by the newest policy from now on."""
        # Copied: the next step is given the memory of this state.
        self.act.use({"params": jax.tree.map(jnp.copy, session.state["params"])})

    def unroll(self, update: int) -> Any:
        """Return a trajectory of each environment; episodes count for an update."""
        made = acting.unroll(self.environment, self.act, self.state, self.unroll_length)
        assert made is not None  # nothing stops it
        self.state = made.acting
        self.returns.add(update, made.episodes)
        return made.trajectories


Turns: TypeAlias = Callable[[Session, Player], Iterator[None]]
"""Acts and learns; yields after each call of the step, where a sitting may end."""


def sit(
    rep: replicator.Replicator,
    agent: Agent,
    environment: acting.VectorEnvironment,
    turns: Turns,
    *,
    unroll_length: int,
    updates_per_unroll: int,
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
      turns: How it does both.
      unroll_length: Steps of a trajectory.
      updates_per_unroll: Updates between one unroll and the next.
      minutes: After which the sitting ends.
      seed: Of everything.
      folder: Where returns and checkpoints are kept; None keeps nothing.
      saved_every_s: From one checkpoint to the next.
      **session: Of the session: `steps`, the updates in all, `directory`, and others.
    """
    began = time.perf_counter()
    session |= run_folder.saved_in(folder, seconds=saved_every_s)
    with rep.session(
        init_fn=agent.init_fn, seed=seed, display=False, **session
    ) as opened:
        begun = opened.steps_done
        unrolls = begun // updates_per_unroll
        player = Player(
            environment=environment,
            act=acting.LocalInference(agent.policy, seed=seed, index=0),
            # Another beginning at each sitting: environments are not in the checkpoint.
            state=acting.start(
                environment,
                agent.initial_core,
                seed=acting.environment_seed(seed, begun),
                steps=unrolls * unroll_length,
            ),
            unroll_length=unroll_length,
            returns=Returns(folder, updates=begun),
        )
        for _ in turns(opened, player):
            if time.perf_counter() - began > 60 * minutes:
                break
    return player.returns.learned(opened.result, since=began)


def learn(
    rep: replicator.Replicator,
    agent: Agent,
    environment: acting.VectorEnvironment,
    *,
    batch_size: int,
    **options: Any,
) -> Learned:
    """Learn from each trajectory once, in order.

    Args:
      rep: Where it learns.
      agent: What acts and learns.
      environment: Where it acts.
      batch_size: Trajectories that an update learns from: all that are made at once, or
        a part, so that the last of them come from a policy some updates older.
      **options: Others of `sit`.
    """

    def turns(session: Session, player: Player) -> Iterator[None]:
        step, batches = session.compile(agent.step_fn), []
        for update in session.steps():
            if not batches:
                player.follow(session)
                batches = cut(player.unroll(update), batch_size)
            metrics = step(batches.pop(0)) | player.returns.metrics()
            session.after(metrics, examples=batch_size * player.unroll_length)
            yield

    each = math.ceil(environment.size / batch_size)
    return sit(rep, agent, environment, turns, updates_per_unroll=each, **options)


def cut(trajectories: Any, size: int) -> list[Any]:
    """Return batches of so many trajectories each."""
    rows = len(trajectories["action"])
    return [
        jax.tree.map(lambda leaf, i=i: leaf[i : i + size], trajectories)
        for i in range(0, rows, size)
    ]
