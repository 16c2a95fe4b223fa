"""`ReplicatedLearner`: a session on trajectories of actors, which get its variables.

    actors ── insert ──▶ table ── take ──▶ session ── step ──▶ variables ──▶ actors

In a learner of several processes the first one has the table, the variables and the
server; all of them have a session, and these read in step and end as one.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator import rpc
from replicator.base.accepts import accepts, seconds, whole
from replicator.base.mesh import replicated
from replicator.base.padded import unpadded
from replicator.base.types import PyTree
from replicator.checkpoint.directories.named import checked_directory, open_directory
from replicator.errors import (
    ArgumentError,
    BatchError,
    CallTimeoutError,
    InputTimeoutError,
)
from replicator.hooks.schedule import Every, every
from replicator.inputs.context import InputContext
from replicator.inputs.options import InputOptions
from replicator.launchpad_bridge.learner import played, shares
from replicator.launchpad_bridge.learner.lifted_step import ROWS, lifted
from replicator.launchpad_bridge.learner.options import LearnerOptions
from replicator.launchpad_bridge.learner.played import Played
from replicator.launchpad_bridge.learner.priority_updates import PriorityUpdates
from replicator.launchpad_bridge.learner.published import (
    GET,
    PublishedVariables,
    Variables,
)
from replicator.launchpad_bridge.learner.trajectory_batches import (
    LOOK_S,
    TrajectoryBatches,
    call_table,
)
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.trajectories import arguments
from replicator.launchpad_bridge.trajectories.table import ActorTurn, Table
from replicator.replicator import Replicator
from replicator.training.session import Session

_LOOK_S = 0.02


class ReplicatedLearner:
    """The object of a `ReplicatedLearnerNode`, in each of its processes.

    Args:
      options: Options of the learner.
      table: Table of trajectories; None in all processes but the first.
      first: Client of the first process, in all others.
      process: Number of this process.
    """

    # Of its server: many actors wait in calls, also at the end.
    thread_pool_size = 1024
    drain_s = 0.5

    def __init__(
        self,
        options: LearnerOptions,
        *,
        table: Table | None = None,
        first: Any = None,
        process: int = 0,
    ) -> None:
        self._options = options
        self._table = table
        self._first = first
        self._process = process
        earlier = options.fixed_lag or 0
        self._lifted = lifted(
            *(options.init_fn, options.step_fn, options.variables),
            earlier=earlier,
            priorities=options.priorities,
            kept=(options.priority_lag or 0, options.batch_size),
        )
        # Not a method: a compiled function that holds `self` would be a cycle.
        self._copy = partial(_copy, options.variables, self._lifted.user_state)
        self._copied = jax.jit(self._copy)
        # Shared by threads of the server and the session: each has its own lock, or is
        # set once (`_taken` and `_shares`, before `_started` is).
        self._published = PublishedVariables(keep=earlier + 1)
        when = options.run.checkpoint_every
        regular = when if isinstance(when, Every) else every(n_steps=when)
        self._saves = shares.Saves(regular.n_steps, regular.seconds)
        self._taken: TrajectoryBatches | None = None
        self._shares: shares.Shares | None = None
        self._priorities: PriorityUpdates | None = None
        self._has_batches = False
        # Evaluated by a learner without an `eval_fn`; replaced, never changed.
        self._acted = played.as_example({})
        self._started = threading.Event()
        self._ended = threading.Event()  # for good: nothing more is read

    @arguments.INSERT
    def insert(
        self,
        trajectories: PyTree,
        *,
        actor: str,
        version: int,
        number: int | None = None,
        snapshot: bytes | None = None,
        episodes: Sequence[float] = (),
    ) -> ActorTurn:
        """Take in trajectories: `Table.insert` of the learner's own table."""
        return self._own_table.insert(
            trajectories,
            actor=actor,
            version=version,
            number=number,
            snapshot=snapshot,
            episodes=episodes,
        )

    @arguments.TURN
    def turn(self, actor: str) -> ActorTurn:
        """Return the turn of an actor: `Table.turn` of the learner's own table."""
        return self._own_table.turn(actor)

    @GET
    def get_variables(
        self,
        names: Sequence[str] | None = None,
        *,
        newer_than: int | None = None,
        version: int | None = None,
        timeout_s: float = 60.0,
    ) -> Variables | None:
        """Return variables: the newest, or those of a version.

        Args:
          names: Names of the variables; all by default.
          newer_than: Version that the caller has; the result is None while it is the
            newest.
          version: Version to wait for.
          timeout_s: Longest wait for the first version, or for `version`.

        Raises:
          VariablesError: A name is not published, or the version is not kept.
        """
        return self._published.get(
            names, newer_than=newer_than, version=version, timeout_s=timeout_s
        )

    @arguments.STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return counts of the run so far.

        Returns:
          `version`, the updates done, None at first; `environment_steps` in batches
          taken, without resets, or `inserted`, the rows of a replay table;
          `episodes`, the number that ended in inserted trajectories;
          `episode_return` and `episode_length`, means over the last hundred of
          either, None before the first; `table`, the counts of the table:
          of a node, at the last call for a batch; with `priorities`, how many were
          sent, left out as not finite, and lost with a table that was gone.
        """
        taken, priorities = self._taken, self._priorities
        return {
            "version": self._published.version,
            **dict.fromkeys(played.MEANS),
            **(Played().numbers() if taken is None else taken.numbers),
            "table": self._table_counts(),
            **({"priorities": priorities.counts} if priorities else {}),
        }

    @accepts(timeout_s=seconds())
    def save(self, timeout_s: float = 60.0) -> int:
        """Save a checkpoint behind the next update; return its step, once it is safe.

        Args:
          timeout_s: Longest wait in seconds.

        Raises:
          ArgumentError: The learner has no `checkpoint_dir`.
          CallTimeoutError: No update was made and saved in time.
        """
        place = checked_directory("checkpoint_dir", self._options.run.checkpoint_dir)
        if place is None:
            raise ArgumentError(
                "`checkpoint_dir` must be given for `save`, got None. Pass it to the "
                "learner's node."
            )
        directory = open_directory(place)
        until_s = time.monotonic() + timeout_s
        self._published.wait_for(0, timeout_s)  # until it has gone on from the last one
        target = (self._published.version or 0) + 1
        while True:
            known = directory.steps()
            if known and known[-1] >= target:
                return known[-1]
            self._saves.asked.set()
            if time.monotonic() >= until_s or rpc.cancelled():
                raise CallTimeoutError(
                    f"`save` must be done within {timeout_s:g} s, got no checkpoint of "
                    f"step {target} or later. See whether trajectories come."
                )
            time.sleep(_LOOK_S)

    @accepts(process=whole(1), number=whole(), timeout_s=seconds())
    def share(
        self, process: int, number: int, timeout_s: float
    ) -> shares.BatchShare | None:
        """Return a process's rows of a batch; for the learner's own processes.

        Args:
          process: Number of the calling process.
          number: Number of the batch.
          timeout_s: Longest wait; the result is None after it.

        Raises:
          ArgumentError: The learner has no such process.
        """
        if process >= self._options.processes:
            raise ArgumentError(
                f"`process` must be below {self._options.processes}, got {process}. "
                "Call the learner of your own group."
            )
        if not self._started.wait(min(timeout_s, LOOK_S)) or self._shares is None:
            return None
        return self._shares.share(process, number, timeout_s)

    def run(self) -> dict[str, Any]:
        """Learn until the steps are done or the program stops.

        Returns:
          `step`, updates done; `metrics` of the last; `variables`, NumPy; `statistics`
          at the end, of the first process. If the program stopped before the first
          batch: 0 and None.
        """
        options = self._options
        node = node_context.get_context()
        run = dataclasses.replace(
            options.run,
            inputs=options.run.inputs or InputOptions(remainder="refuse"),
            init_fn=self._lifted.init_fn,
            checkpoint_every=self._saves,
            node=node,
        )
        if (eval_fn := run.eval_fn) is not None:
            run = dataclasses.replace(
                run,
                eval_fn=lambda state, batch: eval_fn(
                    self._lifted.user_state(state), batch
                ),
            )
        elif run.eval_every is not None and run.eval_dataset is None:
            # `follow` and `retention` rank by metrics of an evaluation.
            run = dataclasses.replace(
                run,
                eval_fn=played.evaluate_means,
                eval_dataset=lambda context: [self._acted],
            )
        devices = shares.devices(options.replicas, options.processes)
        rep = Replicator(options.replicas, devices=devices, strategy=options.strategy)
        if options.priorities is not None and self._process == 0:
            update = partial(call_table, self._own_table, "update_priorities")
            self._priorities = PriorityUpdates(
                update, node.stop_event.is_set, keep=options.priority_lag or 0
            )
        session = rep.session_by(self._lifted.step_fn, self._input_fn, run)
        try:
            self._learn(session, rep)
        except InputTimeoutError as error:
            counts = None if self._process else self._table_counts()
            raise InputTimeoutError(
                f"Actors must insert {options.batch_size} trajectories for each batch, "
                f"got too few in time{f': the table counts {counts}' if counts else ''}"
                ". Look at `run.workers`, or use `InputOptions(timeout_s=...)`."
            ) from error
        except BatchError:
            # An input without any batch is an error, unless the program stops.
            if self._has_batches or not node.stop_event.is_set():
                raise
            return dict.fromkeys(("metrics", "variables", "statistics")) | {"step": 0}
        result = session.result
        return {
            "step": result.step,
            "metrics": result.metrics,
            "variables": jax.device_get(self._newest(result.state)),
            "statistics": None if self._process else self.statistics(),
        }

    def _table_counts(self) -> dict[str, Any]:
        if not hasattr(self._own_table, "futures"):  # not a client, but a table here
            return self._own_table.statistics()
        return {} if self._taken is None else self._taken.table_counts

    def _learn(self, session: Session, rep: Replicator) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._ended.set)
            stack.enter_context(session)
            # First of all: the session waits for the thread that reads, and that one
            # for actors.
            stack.callback(self._ended.set)
            if self._options.is_partitioned:
                self._copied = jax.jit(self._copy, out_shardings=replicated(rep.mesh))
            if self._priorities is not None:
                stack.enter_context(self._priorities)
                rows = self._lifted.priorities(self._local(session.state))
                if rows is not None:
                    self._priorities.go_on(session.steps_done, np.asarray(rows))
            if self._process == 0:
                self._publish_all(session)
            for batch in session.batches():
                self._has_batches = True
                (state,) = session.position.states
                numbers = Played.from_json(state["played"]).numbers()
                self._acted = played.as_example(numbers)
                metrics = session.step(batch, metrics=numbers)
                if self._priorities is not None:
                    self._priorities.send(state["batch"], metrics[ROWS])
                self._publish(session)

    @property
    def _own_table(self) -> Table:
        assert self._table is not None, "only the first process serves"
        return self._table

    def _input_fn(self, context: InputContext) -> Any:
        """Return the batches of this process; in the thread of the session."""
        stop, ended = node_context.get_context().stop_event, self._ended
        if self._process:
            return shares.SharedBatches(
                *(self._first, self._process, self._saves),
                stopped=stop.wait,
                ended=ended.is_set,
            )
        context.batch_size(self._options.batch_size)  # refuses one that does not divide
        self._taken = TrajectoryBatches(
            self._own_table,
            self._options.batch_size,
            is_stopping=lambda: stop.is_set() or ended.is_set(),
            reached=self._published.wait_for,
            max_policy_lag=self._options.max_policy_lag,
            samples_per_call=self._options.samples_per_call,
            steps_per_call=self._options.run.steps_per_call,
            note_keys=self._priorities and self._priorities.note,
            begun=self._priorities and self._priorities.send_again,
            priority_lag=self._options.priority_lag,
        )
        self._shares = shares.Shares(
            self._taken,
            self._options.processes,
            self._saves,
            accumulate=self._options.run.accumulate,
        )
        self._started.set()
        return self._shares

    def _publish_all(self, session: Session) -> None:
        """Publish the first variables, and earlier versions if actors take turns."""
        earlier = self._lifted.earlier(self._local(session.state), session.steps_done)
        for version in sorted(earlier):
            self._published.publish(version, jax.tree.map(jnp.copy, earlier[version]))
        self._publish(session)

    def _publish(self, session: Session) -> None:
        if self._process == 0:
            self._published.publish(session.steps_done, self._newest(session.state))

    def _newest(self, state: PyTree) -> dict[str, PyTree]:
        """Return a copy of the variables for actors, whole, on one device."""
        if self._options.is_partitioned:
            return self._local(self._copied(state))
        return self._copied(self._local(state))

    def _local(self, state: PyTree) -> PyTree:
        """Return one device's copy of arrays that each device has whole."""
        return jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, state)


def _copy(
    variables: Callable[[PyTree], dict[str, PyTree]],
    user_state: Callable[[PyTree], PyTree],
    state: PyTree,
) -> dict[str, PyTree]:
    # Copies: the next step donates the state. They are not waited for here.
    return jax.tree.map(jnp.copy, variables(user_state(unpadded(state))))
