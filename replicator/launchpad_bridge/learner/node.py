"""A learner over many devices, or many processes, as one node."""

from typing import Any

from replicator.base.types import InitFn, StepFn
from replicator.errors import ArgumentError, ProgramError, check_count, check_function
from replicator.launchpad_bridge.learner.learner import (
    LearnerOptions,
    ReplicatedLearner,
    params_of,
)
from replicator.launchpad_bridge.learner.lifted_step import Variables
from replicator.launchpad_bridge.nodes.courier_node import CourierHandle, CourierNode
from replicator.launchpad_bridge.nodes.jax_processes import GroupMember
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.py_node import PyClassNode
from replicator.launchpad_bridge.running.deferred import Deferred
from replicator.launchpad_bridge.trajectories.trajectory_queue import TrajectoryQueue
from replicator.replicator import Replicator

_OWN = {"step_fn", "dataset", "init_fn", "steps", "node"}


class ReplicatedLearnerNode(Node[CourierHandle]):
    """Runs the user's per-replica step on what actors insert, in a session.

    Others see one handle, whatever it runs on. Its methods: `insert`, `turn`,
    `get_variables`, `statistics`, `save`. It stops, saved, when the program stops.

    With `processes` > 1 they are joined by `jax.distributed`, and fail and start again
    as one; give their group a `restart`.

    >>> learner = program.add_node(
    ...     lp.ReplicatedLearnerNode(step_fn, init_fn, steps=1000, batch_size=32),
    ...     label="learner",
    ... )
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
        variables: Variables = params_of,
        table: Any = None,
        max_policy_lag: int | None = None,
        fixed_lag: int | None = None,
        **session: Any,
    ) -> None:
        """Remember what to run.

        Args:
          step_fn: What one replica does: takes a state and trajectories, leaves
            [B / replicas, ...], and maybe a key; returns the state and a dict of
            metrics. Gradients are reduced by `replicator.wrap_optimizer`.
          init_fn: Makes the state of a key.
          steps: Updates in all; None: until the program stops.
          batch_size: B, trajectories in a global batch.
          replicas: Devices to use, of all processes; all by default.
          processes: How many processes there are.
          variables: `variables(state)` returns what actors get, by name;
            `{"params": state["params"]}` by default.
          table: The handle of a node that holds trajectories, or a `Deferred` that
            makes a table in the learner; a queue of 4 B in the learner by default.
          max_policy_lag: Updates that a trajectory may have missed when it is learnt
            from; older ones are dropped, and counted. None for any number.
          fixed_lag: Of actors that take turns: that of the `TrajectoryTurns`.
          **session: As in `Replicator.session`: `directory`, `checkpoint_dir`, `seed`,
            `accumulate`, `hooks`, `step_timeout`, and all others.

        Raises:
          ArgumentError: One is out of range, or the session knows none of this name.
          ProgramError: Two do not go together.
        """
        super().__init__()
        check_function("step_fn", step_fn, "state, trajectories")
        check_function("init_fn", init_fn, "key")
        check_function("variables", variables, "state")
        check_count("batch_size", batch_size)
        check_count("processes", processes)
        _check_lags(max_policy_lag, fixed_lag)
        _check_known(session)
        if replicas is not None and batch_size % replicas:
            raise ArgumentError(
                f"`batch_size` must divide evenly over {replicas} replicas, got "
                f"{batch_size}. Use {batch_size - batch_size % replicas or replicas}."
            )
        if batch_size % processes:
            raise ArgumentError(
                f"`batch_size` must divide evenly over {processes} processes, got "
                f"{batch_size}. Use {batch_size - batch_size % processes or processes}."
            )
        options = LearnerOptions(
            step_fn=step_fn,
            init_fn=init_fn,
            steps=steps,
            batch_size=batch_size,
            replicas=replicas,
            variables=variables,
            max_policy_lag=max_policy_lag,
            fixed_lag=fixed_lag,
            session=session,
        )
        if table is None:
            table = Deferred(TrajectoryQueue, capacity=4 * batch_size)
        self._first = CourierNode(
            ReplicatedLearner, options, table=table, processes=processes
        )
        self._nodes: list[Node[Any]] = [self._first]
        if processes > 1:
            self._nodes = _members(self._first, options, processes)

    @property
    def inner_nodes(self) -> list[Node[Any]]:
        """Return what a planned program has in the place of this node."""
        return list(self._nodes)

    def create_handle(self) -> CourierHandle:
        """Return a handle, which becomes a client of the learner's methods."""
        return self._first.create_handle()

    def belong_to(self, program: Any, label: str) -> None:
        """Know the program that this was added to; its processes are in it, too."""
        super().belong_to(program, label)
        for node in (self._first, *self._nodes):
            node.belong_to(program, label)


class LearnerProcess(GroupMember[Any]):
    """One process of a learner of several.

    Args:
      learner: The node that runs in it, once it has joined the others.
      process: Which one, from 0.
      processes: How many there are.
    """

    def __init__(self, learner: PyClassNode, *, process: int, processes: int) -> None:
        super().__init__(learner.run, (), {}, process=process, processes=processes)
        self._learner = learner

    @property
    def inner_nodes(self) -> list[Node[Any]]:
        """Return the node that runs in it: its address and its handles are found so."""
        return [self._learner]


def _members(
    first: CourierNode, options: LearnerOptions, processes: int
) -> list[Node[Any]]:
    others = [
        PyClassNode(
            ReplicatedLearner,
            options,
            first=first.create_handle(),
            process=process,
            processes=processes,
        )
        for process in range(1, processes)
    ]
    return [
        LearnerProcess(node, process=process, processes=processes)
        for process, node in enumerate([first, *others])
    ]


def _check_lags(max_policy_lag: int | None, fixed_lag: int | None) -> None:
    for name, lag in (("max_policy_lag", max_policy_lag), ("fixed_lag", fixed_lag)):
        if lag is not None and (not isinstance(lag, int) or lag < 0):
            raise ArgumentError(
                f"`{name}` must be a whole number from 0 on, got {lag!r}. Use 1."
            )
    if max_policy_lag is not None and fixed_lag is not None:
        raise ProgramError(
            "`max_policy_lag` must be left out where actors take turns, got both it "
            "and `fixed_lag`. Leave one out."
        )


def _check_known(session: dict[str, Any]) -> None:
    known = set(Replicator.run.__annotations__) - _OWN - {"return"}
    if unknown := sorted(set(session) - known):
        raise ArgumentError(
            f"`ReplicatedLearnerNode` must be given options of a session, got "
            f"`{unknown[0]}`. It takes {', '.join(sorted(known))}."
        )
