"""A learner over many devices, or many processes, as one node."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from replicator.base.types import Dataset, InitFn, StepFn
from replicator.checkpoint.pieces.copy_place import CopyPlace
from replicator.checkpoint.retention import Retention
from replicator.engine.evaluation.evaluate import EvalFn
from replicator.errors import ArgumentError
from replicator.hooks.protocol import Hook
from replicator.hooks.schedule import Every
from replicator.inputs.options import InputOptions
from replicator.launchpad_bridge.handles import Dereferenceable
from replicator.launchpad_bridge.learner.learner import ReplicatedLearner
from replicator.launchpad_bridge.learner.lifted_step import VariablesOf
from replicator.launchpad_bridge.learner.options import LearnerOptions, params_of
from replicator.launchpad_bridge.nodes.courier_node import CourierHandle, CourierNode
from replicator.launchpad_bridge.nodes.jax_processes import GroupMember
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.py_node import PyClassNode
from replicator.launchpad_bridge.running.deferred import Deferred
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.strategies.builders import Builder
from replicator.strategies.strategy import Strategy
from replicator.training.best_metric import Follow
from replicator.training.nonfinite.policy import OnMismatch, OnNonfinite
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import RunOptions
from replicator.training.watchdog.limits import Limits


class ReplicatedLearnerNode(Node[CourierHandle]):
    """Runs the user's per-replica step on the trajectories of actors, in a session.

    It has one handle, with the methods `insert`, `turn`, `get_variables`, `statistics`
    and `save`. It saves and stops when the program stops. Once all learners of a
    program have made their steps, `run.wait()` stops the others, and returns.

    With `processes` > 1 they are joined by `jax.distributed`, and fail and restart as
    one; give their group a `restart`.

    >>> learner = program.add_node(
    ...     lp.ReplicatedLearnerNode(step_fn, init_fn, steps=1000, batch_size=32),
    ...     label="learner",
    ... )

    Args:
      step_fn: Step of one replica: takes a state and trajectories, leaves
        [B / replicas, ...], and maybe a key; returns the state and a dict of metrics.
        With a replay table it takes {"trajectories", "version", "probability"}: a
        sample, and the probability with which each of its rows was drawn. Gradients
        are reduced by `replicator.wrap_optimizer`.
      init_fn: Returns the state for a key.
      steps: Number of updates in all; None for as many as the program runs.
      batch_size: B, the number of trajectories in a global batch.
      replicas: Number of devices to use, the same of each process; all by default.
      processes: Number of processes.
      variables: `variables(state)` returns the variables for actors, by name;
        `{"params": state["params"]}` by default.
      table: Handle of a node that holds trajectories, or a `Deferred` that makes a
        table in the learner; by default a queue in the learner, of four calls' rows.
      max_policy_lag: Updates that a trajectory may have missed when it is learnt from;
        older ones are dropped, and counted. None for any number.
      priorities: Name of a metric of the step, a `Concat` with one number per example:
        the priorities that go back to a replay table, in the background. Its mean is
        the metric of that name in hooks and records.
      samples_per_call: Batches that are taken out of the table by one call: the table,
        and its limiter, must have room for so many times B rows at once.
      fixed_lag: The `lag` of the `TrajectoryTurns`, if actors take turns. The state in
        hooks is then {"state": the user's, "earlier": earlier variables}.
      priority_lag: That of the `ReplayTurns`, if priorities go back to one. The state
        in hooks then has the "priorities" of as many batches, too.
      strategy: See `Replicator`. One that partitions takes one process and actors that
        do not take turns; they get variables whole.

    All others are those of `Replicator.run`. `eval_every` without an `eval_fn`
    evaluates the actors: `episode_return` and `episode_length`, for `follow` and
    `retention`.

    Raises:
      ArgumentError: An option is out of range, or two exclude each other.
    """

    is_expanded = True

    def __init__(
        self,
        step_fn: StepFn,
        init_fn: InitFn,
        *,
        steps: int | None,
        batch_size: int,
        replicas: int | None = None,
        processes: int = 1,
        variables: VariablesOf = params_of,
        table: Any = None,
        max_policy_lag: int | None = None,
        priorities: str | None = None,
        samples_per_call: int = 1,
        fixed_lag: int | None = None,
        priority_lag: int | None = None,
        strategy: Strategy | Builder | None = None,
        seed: int = 0,
        accumulate: int = 1,
        steps_per_call: int = 1,
        inputs: InputOptions | None = None,
        checks: frozenset | None = None,
        check_first_updates: bool | None = None,
        debug: bool = False,
        hooks: Sequence[Hook] = (),
        step_timeout: float | Limits | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 1000,
        retention: Retention | None = None,
        checkpoint_copy: CopyPlace = "device",
        eval_fn: EvalFn | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        eval_every: int | Every | None = None,
        follow: Follow | None = None,
        directory: str | os.PathLike[str] | None = None,
        write_every: int = 10,
        gradient_norm: bool = True,
        display: bool = True,
        profile: range | None = None,
        on_nonfinite: OnNonfinite | None = None,
        spikes: Spikes | None = None,
        check_replicas_every: int | Every | None = None,
        on_mismatch: OnMismatch = "raise",
    ) -> None:
        """Check the options, and plan the processes; nothing starts yet."""
        super().__init__()
        options = LearnerOptions(
            step_fn=step_fn,
            batch_size=batch_size,
            replicas=replicas,
            processes=processes,
            variables=variables,
            max_policy_lag=max_policy_lag,
            priorities=priorities,
            samples_per_call=samples_per_call,
            fixed_lag=fixed_lag,
            priority_lag=priority_lag,
            strategy=strategy,
            run=RunOptions(
                init_fn=init_fn,
                steps=steps,
                seed=seed,
                accumulate=accumulate,
                steps_per_call=steps_per_call,
                inputs=inputs,
                checks=checks,
                check_first_updates=check_first_updates,
                debug=debug,
                hooks=hooks,
                step_timeout=step_timeout,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
                retention=retention,
                checkpoint_copy=checkpoint_copy,
                eval_fn=eval_fn,
                eval_dataset=eval_dataset,
                eval_every=eval_every,
                follow=follow,
                directory=directory,
                write_every=write_every,
                gradient_norm=gradient_norm,
                display=display,
                profile=profile,
                on_nonfinite=on_nonfinite,
                spikes=spikes,
                check_replicas_every=check_replicas_every,
                on_mismatch=on_mismatch,
            ),
        )
        if table is None:
            capacity = 4 * batch_size * samples_per_call
            table = Deferred(TrajectoryQueue, capacity=capacity)
        _check_table(table, priorities)
        self._first = CourierNode(ReplicatedLearner, options, table=table)
        self._nodes: list[Node[Any]] = [self._first]
        if processes > 1:
            self._nodes = _members(self._first, options, processes)
        for node in self._nodes:
            node.ends_program = steps is not None

    @property
    def inner_nodes(self) -> list[Node[Any]]:
        """Return the nodes that a planned program has in place of this one."""
        return list(self._nodes)

    def create_handle(self) -> CourierHandle:
        """Return a handle, which becomes a client of the learner's methods."""
        return self._first.create_handle()


class LearnerProcess(GroupMember[Any]):
    """One process of a learner of several.

    Args:
      learner: Node that runs in it, once it has joined the others.
      process: Number of this process, from 0.
      processes: Number of processes.
    """

    def __init__(self, learner: PyClassNode, *, process: int, processes: int) -> None:
        super().__init__(learner.run, (), {}, process=process, processes=processes)
        self._learner = learner

    @property
    def inner_nodes(self) -> list[Node[Any]]:
        """Return the node that runs in it, with its address and its handles."""
        return [self._learner]

    def belong_to(self, program: Any, label: str) -> None:
        """Note the program that this was added to, and in the node with the handles."""
        super().belong_to(program, label)
        self._learner.belong_to(program, label)


def _check_table(table: object, priorities: str | None) -> None:
    if not isinstance(table, Dereferenceable):
        raise ArgumentError(
            f"`table` must be a handle of a node, or a `Deferred`, got {table!r}. "
            "Write `lp.Deferred(lp.TrajectoryQueue, capacity=...)`."
        )
    made = table if isinstance(table, Deferred) else getattr(table, "node", None)
    kind = getattr(made, "constructor", None)
    if priorities is None or not isinstance(kind, type):
        return  # what a function makes shows its methods when it is called
    if not hasattr(kind, "update_priorities"):
        raise ArgumentError(
            f"`priorities` must be left out with a table that has no "
            f"`update_priorities`, got {priorities!r} and a {kind.__name__}. Use an "
            "`lp.ReplayTable`."
        )


def _members(
    first: CourierNode, options: LearnerOptions, processes: int
) -> list[Node[Any]]:
    others = [
        PyClassNode(
            ReplicatedLearner,
            options,
            first=first.create_handle(),
            process=process,
        )
        for process in range(1, processes)
    ]
    return [
        LearnerProcess(node, process=process, processes=processes)
        for process, node in enumerate([first, *others])
    ]
