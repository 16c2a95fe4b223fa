"""An agent as a program: actors, a queue or a replay table, a replicated learner.

    actors ── trajectories ──▶ table ── batches ──▶ learner
       ▲                         ▲──── priorities ─────┤
       └──────────────── newest variables ─────────────┘

The agent is that of the other scales; here each node gets one of its
functions. With a folder, table and learner that fail start again, three times, from
what they saved there: a replay table with its rows, their keys and priorities.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import replicator.launchpad_bridge as lp
from experiments import run_folder
from experiments.agent import Agent
from experiments.returns import Learned, Returns
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting import Items, VectorEnvironment
from replicator.launchpad_bridge.trajectories.table import ActorTurn

SAMPLES_PER_CALL = 8  # batches that a learner asks a replay table for at once

# Options of a learner: on a queue, and on a replay table.
_TAKES: dict[str, Any] = {"max_policy_lag": 20}
_SAMPLES = {"priorities": "priority", "samples_per_call": SAMPLES_PER_CALL}


class _KeepsReturns:
    """A part of tables that also keep the returns of the episodes that came by."""

    def __init__(
        self, capacity: int, *, folder: Path | None = None, **options: Any
    ) -> None:
        """Make an empty table of a kind. `folder` is where returns go."""
        # Of the table that it is a part of.
        super().__init__(capacity, **options)  # pyright: ignore[reportCallIssue]
        self._returns = Returns(folder)

    def insert(
        self,
        trajectories: Any,
        *,
        version: int,
        episodes: Sequence[float] = (),
        **of_actor: Any,
    ) -> ActorTurn:
        """Take in trajectories; see `Table.insert`."""
        turn = super().insert(  # pyright: ignore[reportAttributeAccessIssue]
            trajectories, version=version, episodes=episodes, **of_actor
        )
        # Behind it: an insert that is refused, or tried again, was none.
        self._returns.add(version, episodes)
        return turn

    def returns(self) -> np.ndarray:
        """Return all (version, return) so far, float64 [episodes, 2]."""
        return np.array(list(self._returns.episodes), np.float64).reshape(-1, 2)


class EpisodeQueue(_KeepsReturns, lp.TrajectoryQueue):
    """A queue that keeps returns."""


class EpisodeReplay(_KeepsReturns, lp.ReplayTable):
    """A replay table that keeps returns."""


def learn(
    agent: Agent,
    make_environment: Callable[[int], VectorEnvironment],
    launch_type: str | lp.Launcher,
    *,
    minutes: float | None = None,
    folder: Path | None = None,
    **options: Any,
) -> Learned:
    """Run the program until the learner has made its updates.

    Args:
      agent: What acts and learns.
      make_environment: Makes the environments of an actor, of its index.
      launch_type: Where nodes run.
      minutes: After which the program is stopped, its learner saved; None for never.
      folder: Where returns and checkpoints are kept, and from where the run goes on.
      **options: As of `make_program`.

    Raises:
      ArgumentError: The learner has not begun in that time.
    """
    began, begun = time.perf_counter(), 0
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        begun = run_folder.last_saved(folder)
        Returns(folder, updates=begun)
    program, table = make_program(agent, make_environment, folder=folder, **options)
    with lp.launch(program, launch_type) as run:
        with contextlib.suppress(lp.RunTimeoutError):
            timeout_s = None if minutes is None else 60 * minutes
            run.wait(timeout_s, labels=["learner"])
        seconds = time.perf_counter() - began
        returns = table.dereference().returns()  # also the script may call nodes
        run.stop_and_wait()
        (found,) = run.results_of("learner")
    if found["variables"] is None:
        raise ArgumentError(
            f"`--minutes` must be enough for a learner to begin, got {minutes}. Use 1."
        )
    return Learned(
        params=found["variables"]["params"],
        updates=found["step"],
        begun=begun,
        returns=[(int(version), gained) for version, gained in returns.tolist()],
        seconds=seconds,
    )


def make_program(
    agent: Agent,
    make_environment: Callable[[int], VectorEnvironment],
    *,
    actors: int,
    batch_size: int,
    unroll_length: int,
    steps: int | None,
    seed: int = 0,
    replay: dict[str, Any] | None = None,
    items: Items | None = None,
    name: str = "agent",
    evaluator: Callable[[Any], Any] | None = None,
    folder: Path | None = None,
    saved_every_s: float = run_folder.SAVED_EVERY_S,
    **session: Any,
) -> tuple[lp.Program, lp.CourierHandle]:
    """Return the program, and the handle of its table.

    Args:
      agent: What acts and learns.
      make_environment: Makes the environments of an actor, of its index.
      actors: How many; each that fails starts again, ten times.
      batch_size: Trajectories that an update learns from.
      unroll_length: Steps of a trajectory.
      steps: Updates in all; None for no end.
      seed: Of the run.
      replay: Options of a `ReplayTable`, whose rows' priorities are the agent's metric
        `priority`; None for a queue.
      items: Makes the rows of a replay table.
      name: Of the program.
      evaluator: Makes, of a client of the learner, an object whose `run` watches the
        policy until the program stops; None for none.
      folder: Where returns, rows and checkpoints are kept; None keeps nothing.
      saved_every_s: From one checkpoint to the next, of table and learner.
      **session: Of the learner and its session: `max_policy_lag`, `directory`.
    """
    program = lp.Program(name)
    again = None if folder is None else lp.Restart(attempts=3)
    with program.group("queue" if replay is None else "replay", restart=again):
        table = program.add_node(
            table_node(replay, batch_size, folder=folder, saved_every_s=saved_every_s)
        )
    options = {"steps": steps, "batch_size": batch_size, "seed": seed, "table": table}
    options |= run_folder.saved_in(folder, seconds=saved_every_s)
    options |= (_TAKES if replay is None else _SAMPLES) | session
    functions = agent.step_fn, agent.init_fn
    with program.group("learner", restart=again):
        learner = program.add_node(
            lp.ReplicatedLearnerNode(*functions, display=False, **options)
        )
    act = (make_environment, agent.policy, agent.initial_core, learner)
    options = {"items": items, "unroll_length": unroll_length, "seed": seed}
    with program.group("actor", restart=lp.Restart(attempts=10)):
        for index in range(actors):
            node = lp.PyClassNode(lp.Actor, *act, table=table, index=index, **options)
            program.add_node(node)
    if evaluator is not None:
        program.add_node(lp.PyClassNode(evaluator, learner), label="evaluator")
    return program, table


def table_node(
    replay: dict[str, Any] | None,
    batch_size: int,
    *,
    folder: Path | None,
    saved_every_s: float,
) -> lp.CourierNode:
    """Return the node of a program's table; arguments are those of `make_program`."""
    if replay is None:
        return lp.CourierNode(EpisodeQueue, capacity=3 * batch_size, folder=folder)
    if folder is not None:
        rows = {"checkpoint_dir": run_folder.rows_of(folder)}
        replay = rows | {"checkpoint_every_s": saved_every_s} | replay
    return lp.CourierNode(EpisodeReplay, folder=folder, **replay)
