"""Act in environments and hand trajectories to a table, until the program stops.

Free mode: each unroll takes the newest variables, acts, inserts. What was on its way to
a table that died is lost, and counted.

Deterministic mode: the table says which turn is the actor's next, and which version of
the variables to act with. The actor sends a snapshot of itself along with each turn. It
goes back to one of them when it, the table or the learner was started again:

    actor                            table                       learner
    turn(name)             ───────▶  number 7, snapshot of 6
    restore
    get_variables(version) ──────────────────────────────────▶   waits until published
    unroll
    insert(number 7, snapshot of 7) ▶ number 8
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    CheckpointMismatchError,
    ReplicatorError,
    check_count,
    check_flags,
    check_whole,
)
from replicator.launchpad_bridge.acting.environments import (
    EnvironmentFailedError,
    VectorEnvironment,
)
from replicator.launchpad_bridge.acting.inference import RemoteInference
from replicator.launchpad_bridge.acting.local_inference import LocalInference, Policy
from replicator.launchpad_bridge.acting.unroll import (
    Acting,
    Unrolled,
    environment_seed,
    pack_acting,
    start,
    unpack_acting,
    unroll,
)
from replicator.launchpad_bridge.acting.waiting import (
    UNANSWERED,
    ProgramStoppedError,
    Waiting,
)
from replicator.launchpad_bridge.learner.published import Variables
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.trajectories.table import TrajectoryError, Turn

_LOG = logging.getLogger(__name__)
_VERSION_WAIT_S = 1.0  # then the table is asked whether the turn is still the same
_LOST_PAUSE_S = 0.2
_LOOK_AGAIN_S = 0.05  # where a learner has published nothing yet


class Actor:
    """Acts with a policy and inserts trajectories; the object of a `PyClassNode`.

    >>> actor = lp.PyClassNode(                                     # doctest: +SKIP
    ...     Actor, make_environment, policy, initial_core, learner, index=0,
    ...     unroll_length=20,
    ... )
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
    ) -> None:
        """Make an actor and its environments.

        Args:
          make_environment: Makes a `VectorEnvironment`; takes the actor's index.
          policy: `policy(variables, observation, first, core, key)`, pure, over n
            environments; `variables` is what the learner publishes, by name.
          initial_core: Recurrent state of so many environments; `()` without.
          learner: Client of who publishes variables: `get_variables`.
          index: The actor's own: its random keys and its environments follow from it.
          unroll_length: Steps in each trajectory.
          table: Client of who holds trajectories; the learner by default.
          inference: Client of an `InferenceServer`, which then runs the policy.
          seed: Of the run.
          name: By which the table knows it; the worker's name in a program, else
            "actor/<index>".
          episodes: Stop after so many; None: with the program.
          is_deterministic: Whether the table says what to do next, so that a run that
            was killed anywhere ends with the same bits.
          one_episode_per_trajectory: Whether each trajectory begins with a new episode,
            whose seed follows from seed, index and number: then environments need no
            snapshots, and trajectories do not overlap.

        Raises:
          ArgumentError: An argument breaks its rule; or it is deterministic, and cannot
            go back: environments without snapshots, or a central inference, whose
            batches (and so its rounding) depend on who calls when.
        """
        check_whole("index", index)
        check_whole("seed", seed)
        check_count("unroll_length", unroll_length)
        if episodes is not None:
            check_count("episodes", episodes)
        check_flags(
            is_deterministic=is_deterministic,
            one_episode_per_trajectory=one_episode_per_trajectory,
        )
        if is_deterministic and inference is not None:
            raise ArgumentError(
                "`inference` must be None with `is_deterministic=True`, got "
                f"{inference!r}. Leave it out: each actor then runs the policy itself."
            )
        context = node_context.current()
        self.name = name or (context.worker if context else f"actor/{index}")
        self._environment = make_environment(index)
        if is_deterministic and not one_episode_per_trajectory:
            _check_snapshots(self._environment)
        self._initial_core = initial_core
        self._learner = learner
        self._table = learner if table is None else table
        self._index, self._seed = index, seed
        self._length = unroll_length
        self._most_episodes = episodes
        self._is_deterministic = is_deterministic
        self._begins_anew = one_episode_per_trajectory
        # A second start in free mode shall not live through the first one's episodes.
        self._attempt = context.attempt if context and not is_deterministic else 0
        self._waiting = Waiting(self.name, context.stop_event if context else _never())
        self._act = (
            LocalInference(policy, seed=seed, index=index)
            if inference is None
            else RemoteInference(inference, self._waiting, seed=seed, index=index)
        )
        self._acting: Acting | None = None
        self._number = -1  # of the turn that `_acting` is ready for
        self._version: int | None = None
        self._counts = dict.fromkeys(
            ("steps", "trajectories", "episodes", "lost", "refused", "restored"), 0
        )

    def run(self) -> dict[str, Any]:
        """Act until the program stops, or `episodes` have ended.

        Returns:
          What `statistics` does.

        Raises:
          EnvironmentFailedError: An environment raised; names the actor.
          TrajectoryError: The table refused a turn: without it nobody can go on.
          CheckpointMismatchError: The table has no snapshot for the turn it wants.
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

    def statistics(self) -> dict[str, Any]:
        """Return counts of what happened.

        Returns:
          `steps` of all environments together; `trajectories` inserted, `lost` on their
          way, `refused` by the table; `episodes` ended; turns gone back, `restored`;
          `waits`, `waited_s` for nodes that were gone; `version` acted with last.
        """
        return {
            **self._counts,
            "waits": self._waiting.waits,
            "waited_s": self._waiting.waited_s,
            "version": self._version,
        }

    def _run(self) -> None:
        stop = self._waiting.stop
        turn = self._first_turn()
        while not stop.is_set() and not self._has_enough():
            turn = self._variables_for(turn)
            unrolled = self._unroll(turn)
            if unrolled is None:
                return
            turn = self._insert(unrolled, turn)

    def _has_enough(self) -> bool:
        most = self._most_episodes
        return most is not None and self._counts["episodes"] >= most

    def _first_turn(self) -> Turn:
        if not self._is_deterministic:
            return Turn()
        turn = self._waiting.call("its turn", lambda: self._table.turn(self.name))
        if turn.number is None:
            raise ArgumentError(
                "`table` must give turns where `is_deterministic=True`, got one that "
                "takes trajectories in any order. Use `TrajectoryTurns`."
            )
        return turn

    # Variables

    def _variables_for(self, turn: Turn) -> Turn:
        """Have the variables that a turn needs; return it, or the one to do instead."""
        if isinstance(self._act, RemoteInference):
            return turn  # whose server has them
        if turn.version is None:
            self._use_newest(self._act)
            return turn
        while turn.version != self._version:
            turn = self._use_version(self._act, turn)
        return turn

    def _use_newest(self, act: LocalInference) -> None:
        while True:
            found = self._waiting.call(
                "variables",
                lambda: self._learner.get_variables(newer_than=self._version),
            )
            self._use(act, found)
            if self._version is not None:
                return
            self._waiting.pause(_LOOK_AGAIN_S)

    def _use_version(self, act: LocalInference, turn: Turn) -> Turn:
        """Fetch a version; if it does not come, ask which turn it is by now.

        A learner that went back to its checkpoint wants other turns first, and would
        never publish this one.
        """
        failed: Exception | None = None
        try:
            found = self._learner.get_variables(
                version=turn.version, timeout_s=_VERSION_WAIT_S
            )
            self._use(act, found)
            if found is not None:
                return turn
        except UNANSWERED as error:
            self._waiting.lost(f"variables of version {turn.version}", error)
            self._waiting.pause(_LOST_PAUSE_S)
        except ReplicatorError as error:  # it is no longer kept
            failed = error
        now = self._first_turn()
        is_same = (now.number, now.version) == (turn.number, turn.version)
        if failed is not None and is_same:
            raise failed
        return now

    def _use(self, act: LocalInference, found: Variables | None) -> None:
        if found is not None:
            act.use(found.values)
            self._version = found.version

    # Acting

    def _unroll(self, turn: Turn) -> Unrolled | None:
        number = self._number if turn.number is None else turn.number
        if self._acting is None or number != self._number or self._begins_anew:
            self._go_to(turn)
        assert self._acting is not None
        if isinstance(self._act, RemoteInference):
            self._act.oldest_version = None
        return unroll(
            self._environment,
            self._act,
            self._acting,
            self._length,
            is_stopped=self._waiting.stop.is_set,
        )

    def _go_to(self, turn: Turn) -> None:
        """Be where a turn begins: begin anew, or go back to a snapshot."""
        if turn.number is None:
            number = max(self._number, 0)
        else:
            number = turn.number
            self._counts["restored"] += self._number not in (-1, number)
        if turn.snapshot is not None and not self._begins_anew:
            self._acting = unpack_acting(
                self._environment, self._initial_core, turn.snapshot
            )
        else:
            if number > 0 and self._is_deterministic and not self._begins_anew:
                raise CheckpointMismatchError(
                    f"`turn` {number} of '{self.name}' must come with a snapshot, got "
                    "none. Go on with `one_episode_per_trajectory=True`, as the run "
                    "was begun, or begin it anew."
                )
            seed = environment_seed(self._seed, self._index, number, self._attempt)
            steps = number * self._length if self._begins_anew else 0
            self._acting = start(
                self._environment, self._initial_core, seed=seed, steps=steps
            )
        self._number = number

    # Inserting

    def _insert(self, unrolled: Unrolled, turn: Turn) -> Turn:
        self._acting = unrolled.acting
        self._number += 1
        size = self._environment.size
        self._counts["steps"] += size * self._length
        self._counts["episodes"] += len(unrolled.episodes)
        try:
            turn = self._inserted(unrolled, turn)
            self._counts["trajectories"] += size
        except TrajectoryError as error:
            if self._is_deterministic:
                raise
            self._refused(size, error)
        except UNANSWERED as error:
            # Only in free mode: whether the table had it before it died is not known.
            self._waiting.lost("its table", error)
            self._counts["lost"] += size
        return turn

    def _inserted(self, unrolled: Unrolled, turn: Turn) -> Turn:
        version = self._acted_with()
        keeps = self._is_deterministic and not self._begins_anew
        snapshot = pack_acting(self._environment, unrolled.acting) if keeps else None

        def insert() -> Turn:
            return self._table.insert(
                unrolled.trajectories,
                actor=self.name,
                version=version,
                number=turn.number,
                snapshot=snapshot,
                episodes=unrolled.episodes,
            )

        # A turn has a number, so the table knows it again; other trajectories might get
        # there twice, but for those that found no room in time.
        again_after = UNANSWERED if self._is_deterministic else (TimeoutError,)
        return self._waiting.call("its table", insert, again_after=again_after)

    def _acted_with(self) -> int:
        """Return the version that the latest unroll counts as: the oldest in it."""
        if isinstance(self._act, RemoteInference):
            self._version = self._act.oldest_version
        assert self._version is not None
        return self._version

    def _refused(self, size: int, error: TrajectoryError) -> None:
        self._counts["refused"] += size
        times = self._counts["refused"] // size
        if times & (times - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _LOG.warning(
                "%s: trajectories were refused (%d times by now): %s",
                self.name,
                times,
                error,
            )


def _never() -> threading.Event:
    """Return what stops an actor outside of a program: nothing."""
    return threading.Event()


def _check_snapshots(environment: VectorEnvironment) -> None:
    if not environment.can_snapshot:
        raise ArgumentError(
            "`make_environment` must make environments with `snapshot` and `restore` "
            f"where `is_deterministic=True`, got {type(environment).__name__} without. "
            "Give it these, or pass `one_episode_per_trajectory=True`."
        )
