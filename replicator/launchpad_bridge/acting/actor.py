"""Act in environments and insert trajectories into a table, until the program stops.

Free mode: each unroll takes the newest variables, acts, inserts. Trajectories sent to a
table that died are lost, and counted.

Deterministic mode: the table returns the actor's next turn, and the version of the
variables to act with. The actor sends a snapshot of itself along with each turn. It
goes back to one of them when it, the table or the learner was restarted:

    actor                            table                       learner
    turn(name)             ───────▶  number 7, snapshot of 6
    restore
    get_variables(version) ──────────────────────────────────▶   waits until published
    unroll
    insert(number 7, snapshot of 7) ▶ number 8
"""

import logging
from collections.abc import Callable
from typing import Any

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    CheckpointMismatchError,
    check_count,
    check_flags,
)
from replicator.launchpad_bridge.acting.environments import (
    EnvironmentFailedError,
    VectorEnvironment,
)
from replicator.launchpad_bridge.acting.inference import RemoteInference
from replicator.launchpad_bridge.acting.items import (
    Items,
    joined_rows,
    split_rows,
)
from replicator.launchpad_bridge.acting.local_inference import Policy
from replicator.launchpad_bridge.acting.pulled_inference import PulledInference
from replicator.launchpad_bridge.acting.snapshots import pack, unpack
from replicator.launchpad_bridge.acting.unroll import (
    Acting,
    Unrolled,
    environment_seed,
    pack_acting,
    start,
    start_number,
    unpack_acting,
    unroll,
)
from replicator.launchpad_bridge.acting.waiting import (
    UNANSWERED,
    ProgramStoppedError,
    Waiting,
)
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.trajectories.arguments import STATISTICS
from replicator.launchpad_bridge.trajectories.table import (
    ActorTurn,
    TableTimeoutError,
    TrajectoryError,
)

_LOG = logging.getLogger(__name__)


class Actor:
    """Acts with a policy and inserts trajectories; the object of a `PyClassNode`.

        with program.group("actors", restart=lp.Restart(attempts=3)):
            for index in range(4):
                node = lp.PyClassNode(
                    Actor,
                    *(make_environment, policy, initial_core, learner),
                    index=index,
                    unroll_length=20,
                )
                program.add_node(node)

    One that is killed is restarted, and goes on from the table's turn.
    """

    def __init__(
        self,
        make_environment: Callable[[int], VectorEnvironment],
        policy: Policy,
        initial_core: Callable[[int], PyTree],
        learner: Any,
        *,
        index: int,
        unroll_length: int,
        table: Any = None,
        inference: Any = None,
        seed: int = 0,
        name: str | None = None,
        episodes: int | None = None,
        is_deterministic: bool = False,
        one_episode_per_trajectory: bool = False,
        items: Items | None = None,
    ) -> None:
        """Make an actor and its environments.

        Args:
          make_environment: Makes a `VectorEnvironment`; takes the actor's index.
          policy: `policy(variables, observation, first, core, key)`, pure, over n
            environments; `variables` are the learner's, by name. With required
            parameters `index` or `steps` it gets the actor's index, or the steps that
            its environments have taken, int32 scalars.
          initial_core: Returns the recurrent state of n environments; `()` for none.
          learner: Client of an object with `get_variables`.
          index: Index of the actor; its random keys and its environments depend on it.
            Without turns they also depend on its name, and on the learner's version
            when it started: no start repeats the episodes of another.
          unroll_length: Number of steps in each trajectory.
          table: Client of a table of trajectories; the learner by default.
          inference: Client of an `InferenceServer`, which then runs the policy.
          seed: Seed of the run.
          name: Name of the actor in the table; the worker's name in a program, else
            "actor/<index>".
          episodes: Number of episodes to stop after; None to stop with the program.
          is_deterministic: Whether the table gives turns, so that a run that was killed
            anywhere ends with the same bits.
          one_episode_per_trajectory: Whether each trajectory begins with a new episode,
            whose seed follows from seed, index and number: then environments need no
            snapshots, and trajectories do not overlap.
          items: `n_step` or `sequences`: makes the rows that are inserted, for a replay
            table. Where that gives turns, an actor unrolls until it has the rows of
            one; what is left over waits for the next, and has that one's version. None
            inserts the trajectories themselves.

        Raises:
          ArgumentError: An argument breaks its rule; or it is deterministic, and cannot
            go back: environments without snapshots, or a central inference, whose
            batches (and so its rounding) depend on the timing of calls.
        """
        for argument, number in (("index", index), ("seed", seed)):
            check_count(argument, number, "Use 0.", least=0)
        check_count("unroll_length", unroll_length)
        if episodes is not None:
            check_count("episodes", episodes)
        check_flags(
            is_deterministic=is_deterministic,
            one_episode_per_trajectory=one_episode_per_trajectory,
        )
        if items is not None and not isinstance(items, Items):
            raise ArgumentError(
                f"`items` must make items of unrolls, got {items!r}. Pass "
                "`lp.n_step(5, discount=0.99)` or `lp.sequences(length=80)`."
            )
        if is_deterministic and episodes is not None:
            raise ArgumentError(
                "`episodes` must be None with `is_deterministic=True`, got "
                f"{episodes}. Leave it out: the others would wait for its turns."
            )
        if is_deterministic and inference is not None:
            raise ArgumentError(
                "`inference` must be None with `is_deterministic=True`, got "
                f"{inference!r}. Leave it out: each actor then runs the policy itself."
            )
        context = node_context.current()
        self._waiting = Waiting.of_node(name, f"actor/{index}")
        self.name = self._waiting.name
        self._environment = make_environment(index)
        if is_deterministic and not one_episode_per_trajectory:
            _check_snapshots(self._environment)
        self._initial_core = initial_core
        self._table = learner if table is None else table
        self._index, self._seed = index, seed
        self._length = unroll_length
        self._most_episodes = episodes
        self._is_deterministic = is_deterministic
        self._begins_anew = one_episode_per_trajectory
        self._items = items
        self._attempt = context.attempt if context else 0
        self._start: int | None = 0 if is_deterministic else None  # once it is known
        self._inference = (
            PulledInference(policy, learner, self._waiting, seed=seed, index=index)
            if inference is None
            else RemoteInference(inference, self._waiting, seed=seed, index=index)
        )
        self._acting: Acting | None = None
        self._steps: Any = None  # of `_acting` that wait to become items
        self._rows: PyTree = None  # items that wait for a turn to be full
        self._episodes: list[float] = []  # that ended since the last insert
        self._refusals = 0
        self._number = 0  # of the turn that `_acting` is ready for
        self._counts = dict.fromkeys(
            ("steps", "trajectories", "episodes", "lost", "refused", "restored"), 0
        )

    def run(self) -> dict[str, Any]:
        """Act until the program stops, or `episodes` have ended.

        Returns:
          The result of `statistics`.

        Raises:
          EnvironmentFailedError: An environment raised; names the actor.
          TrajectoryError: The table refused a turn: without it no actor can go on.
          CheckpointMismatchError: The table has no snapshot for the turn it returned.
        """
        try:
            self._run()
        except ProgramStoppedError:
            pass
        except EnvironmentFailedError as error:
            raise EnvironmentFailedError(f"`{self.name}`: {error}") from error.__cause__
        finally:
            close = getattr(self._environment, "close", None)
            if close is not None:
                close()
        return self.statistics()

    @STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return counts of its work.

        Returns:
          `steps` of all environments together; `trajectories`, or items, inserted,
          `lost` on their way, `refused` by the table; `episodes` ended; `restored`, the
          number of times that it went back to a turn or started from a snapshot;
          `waits`, `waited_s` for nodes that were gone; `version` acted with last.
        """
        return {
            **self._counts,
            "waits": self._waiting.waits,
            "waited_s": self._waiting.waited_s,
            "version": self._inference.version,
        }

    def _run(self) -> None:
        stop = self._waiting.stop
        turn = self._ask_turn()
        while not stop.is_set() and not self._has_enough():
            turn = self._inference.ready_for(turn, self._ask_turn)
            self._be_at(turn)
            if not self._due(turn):
                unrolled = self._unroll()
                if unrolled is None:
                    return
                self._add(unrolled)
            if due := self._due(turn):  # else the next unroll belongs to it, too
                turn = self._insert(turn, due)

    def _has_enough(self) -> bool:
        most = self._most_episodes
        return most is not None and self._counts["episodes"] >= most

    def _ask_turn(self) -> ActorTurn:
        if not self._is_deterministic:
            return ActorTurn()
        turn = self._waiting.call("its turn", lambda: self._table.turn(self.name))
        if turn.number is None:
            raise ArgumentError(
                "`table` must give turns where `is_deterministic=True`, got one that "
                "takes trajectories in any order. Use `TrajectoryTurns`."
            )
        return turn

    def _be_at(self, turn: ActorTurn) -> None:
        number = self._number if turn.number is None else turn.number
        if self._acting is None or number != self._number or self._begins_anew:
            self._go_to(number, turn.snapshot)

    def _due(self, turn: ActorTurn) -> int:
        """Return how many of the rows that wait are inserted now; 0 for none yet."""
        size = 0 if self._rows is None else len(self._rows["reward"])
        wanted = turn.rows_per_turn
        if wanted is None or self._items is None or self._begins_anew:
            return size  # those left over are in the snapshot, if there is one
        return wanted if size >= wanted else 0

    def _unroll(self) -> Unrolled | None:
        assert self._acting is not None, "`_be_at` was called"
        return unroll(
            self._environment,
            self._inference,
            self._acting,
            self._length,
            is_stopped=self._waiting.stop.is_set,
        )

    def _add(self, unrolled: Unrolled) -> None:
        self._acting = unrolled.acting
        self._counts["steps"] += self._environment.size * self._length
        self._counts["episodes"] += len(unrolled.episodes)
        self._episodes += unrolled.episodes
        rows: Any = unrolled.trajectories
        if self._items is not None:
            rows, self._steps = self._items(rows, self._steps, ends=self._begins_anew)
        self._rows = joined_rows(self._rows, rows)

    def _go_to(self, number: int, snapshot: bytes | None) -> None:
        """Go to the beginning of a turn: begin anew, or restore a snapshot."""
        if self._begins_anew:
            snapshot = None
        goes_back = self._acting is not None or snapshot is not None
        self._counts["restored"] += goes_back and self._number != number
        self._steps = self._rows = None
        if snapshot is not None:
            packed: Any = snapshot
            if self._items is not None:
                packed, self._steps, *rows = unpack(snapshot)
                (self._rows,) = rows or [None]  # older snapshots do not have them
            self._acting = unpack_acting(self._environment, self._initial_core, packed)
        else:
            if number > 0 and self._is_deterministic and not self._begins_anew:
                raise CheckpointMismatchError(
                    f"`turn` {number} of '{self.name}' must come with a snapshot, got "
                    "none. Go on with `one_episode_per_trajectory=True`, as the run "
                    "was begun, or begin it anew."
                )
            seed = environment_seed(
                self._seed, self._index, number=number, start=self._reseeded()
            )
            steps = number * self._length if self._begins_anew else 0
            self._acting = start(
                self._environment, self._initial_core, seed=seed, steps=steps
            )
        self._number = number

    def _reseeded(self) -> int:
        """Return the number of this start, which reseeds the policy, too."""
        # A second start, one after the learner went on from a checkpoint, and another
        # actor with the same index must not make the same trajectories again.
        if self._start is None:
            version = self._inference.first_version()
            self._start = start_number(
                self.name, version=version, attempt=self._attempt
            )
            self._inference.reseed(self._start)
        return self._start

    def _insert(self, turn: ActorTurn, size: int) -> ActorTurn:
        rows, self._rows = split_rows(self._rows, size)
        self._number += 1
        try:
            turn = self._inserted(rows, turn)
            self._counts["trajectories"] += size
        except TrajectoryError as error:
            if self._is_deterministic:
                raise
            self._refused(size, error)
        except UNANSWERED as error:
            # Only in free mode: the table may have received it before it died.
            self._waiting.lost("its table", error)
            self._counts["lost"] += size
        self._episodes = []
        return turn

    def _inserted(self, rows: Any, turn: ActorTurn) -> ActorTurn:
        version = self._inference.version
        keeps = self._is_deterministic and not self._begins_anew
        snapshot = self._snapshot() if keeps else None

        def insert() -> ActorTurn:
            return self._table.insert(
                rows,
                actor=self.name,
                version=version,
                number=turn.number,
                snapshot=snapshot,
                episodes=self._episodes,
            )

        # A turn has a number, so the table recognises it; other trajectories might be
        # inserted twice, except after the table's own error that it had no room. A call
        # that is only late, `CallTimeoutError`, may have been run.
        again_after = UNANSWERED if self._is_deterministic else (TableTimeoutError,)
        return self._waiting.call("its table", insert, again_after=again_after)

    def _snapshot(self) -> bytes:
        assert self._acting is not None, "an unroll has ended"
        packed = pack_acting(self._environment, self._acting)
        if self._items is None:
            return packed
        return pack((packed, self._steps, self._rows))

    def _refused(self, size: int, error: TrajectoryError) -> None:
        self._counts["refused"] += size
        self._refusals += 1
        times = self._refusals
        if times & (times - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _LOG.warning(
                "%s: trajectories were refused (%d times by now): %s",
                self.name,
                times,
                error,
            )


def _check_snapshots(environment: VectorEnvironment) -> None:
    if not environment.can_snapshot:
        raise ArgumentError(
            "`make_environment` must make environments with `snapshot` and `restore` "
            f"where `is_deterministic=True`, got {type(environment).__name__} without. "
            "Give it these, or pass `one_episode_per_trajectory=True`."
        )
