"""One node that runs the policy for many actors in batches, as on an accelerator.

    actor ── act(observation [n], first, core, key, place) ──┐
    actor ── act(...) ───────────────────────────────────────┤  up to `batch_size` calls
    actor ── act(...) ───────────────────────────────────────┴─▶ policy over [calls, n]

Calls are stacked, padded to the next power of two, and the policy is mapped over them
(`vmap`), so each call keeps its own random key and there is one compilation for each
power of two (and each n). The recurrent state travels with the calls: the server has no
state of an actor, and one that is restarted goes on with the next call.

Batching of inference: L. Espeholt et al., "SEED RL", ICLR 2020.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicator import rpc
from replicator.base.accepts import accepts, array
from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    CallCancelledError,
    ServerStoppedError,
    check_count,
    check_positive,
)
from replicator.launchpad_bridge.acting import local_inference
from replicator.launchpad_bridge.acting.waiting import ProgramStoppedError, Waiting
from replicator.launchpad_bridge.batched_handler import batched_handler
from replicator.launchpad_bridge.learner.published import Variables
from replicator.launchpad_bridge.trajectories.arguments import ROWS, STATISTICS
from replicator.launchpad_bridge.trajectories.table import ActorTurn

_MOST_ROWS = 65_536  # in a call
_MOST_FORMS = 32  # of calls: the compilation of each is kept
_LOOK_S = 0.5  # between two checks of the stop, in a batch that waits for variables


class InferenceServer:
    """Runs the policy for actors; the object of a `CourierNode`.

        node = lp.CourierNode(InferenceServer, policy, learner, batch_size=32)
        inference = program.add_node(node, label="inference")

    Actors get the handle as `inference=`.
    """

    # Of its server: each call of a batch waits in a thread.
    thread_pool_size = 1024

    def __init__(
        self,
        policy: local_inference.Policy,
        learner: Any,
        *,
        batch_size: int = 16,
        timeout_s: float = 0.002,
        refresh_s: float = 0.02,
        device: Any = None,
    ) -> None:
        """Make a server; variables come once it runs.

        Args:
          policy: See `Actor`.
          learner: Client of an object with `get_variables`.
          batch_size: Number of calls in a full batch: at most one for each actor.
          timeout_s: Longest wait of a call for others.
          refresh_s: Seconds between two calls for newer variables.
          device: Device of the policy; the first of this process by default.

        Raises:
          ArgumentError: A number is out of range.
        """
        check_count("batch_size", batch_size)
        check_positive("refresh_s", refresh_s, "Use 0.02.")
        self._waiting = Waiting.of_node(None, "inference")
        self._policy = policy
        self._learner = learner
        self._refresh_s = refresh_s
        self._device = device or jax.local_devices()[0]
        # Written by the one thread that refreshes, read by the one that runs a batch.
        # No lock: version and variables are one object, so they always match.
        self._held: Variables | None = None
        self._is_ready = threading.Event()
        # Written by the thread of a batch; there is one batch at a time.
        self._batches = self._calls = self._rows = 0
        self._forms: set[Any] = set()  # of calls that were answered
        self._act = batched_handler(batch_size, timeout=timeout_s)(self._act)
        act = functools.partial(self.act)
        vars(act)["batch_size"] = batch_size  # read by its server
        self.act = act

    @accepts(
        observation=ROWS,
        first=array("b", _MOST_ROWS),
        core=ROWS,
        key=array("u", 16),
        place=array("i", 2),
    )
    def act(
        self,
        observation: PyTree,
        first: np.ndarray,
        core: PyTree,
        key: np.ndarray,
        place: np.ndarray,
    ) -> tuple[PyTree, PyTree, PyTree, np.ndarray]:
        """Return actions, extras, the next core and the version of the variables.

        A call has n rows; concurrent calls run as one batch, in which each leaf has
        another axis in front.

        Args:
          observation: Leaves [n, ...]; in dictionaries, tuples or dataclasses.
          first: bool [n].
          core: Leaves [n, ...].
          key: Data of a random key.
          place: int32 [2], the actor's index and its steps so far.

        Raises:
          ArgumentError: A leaf does not have n rows, or another argument breaks its
            rule.
          ServerStoppedError: The program stops.
        """
        for leaf in jax.tree.leaves((observation, core)):
            if np.shape(leaf)[:1] != first.shape:
                raise ArgumentError(
                    f"`observation` and `core` must have {len(first)} rows, as `first` "
                    f"has, got a leaf of shape {np.shape(leaf)}. Pass a row for each."
                )
        return self._act(observation, first, core, key, place)

    def _act(
        self,
        observation: PyTree,
        first: np.ndarray,
        core: PyTree,
        key: np.ndarray,
        place: np.ndarray,
    ) -> tuple[PyTree, PyTree, PyTree, np.ndarray]:
        held = self._wait_held()
        calls = len(key)
        leaves, structure = jax.tree.flatten((observation, first, core, key, place))
        form = structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if form not in self._forms and len(self._forms) >= _MOST_FORMS:
            raise ArgumentError(
                f"`observation` must be of at most {_MOST_FORMS} forms, got one more. "
                "Give all actors environments of the same shapes."
            )
        extra = local_inference.extra_arguments(
            self._policy, index=place[:, 0], steps=place[:, 1]
        )
        arguments = jax.tree.map(
            lambda leaf: _padded(leaf, calls), (observation, first, core, key, extra)
        )
        results = local_inference.run_mapped(self._policy, held.values, *arguments)
        self._forms.add(form)
        action, extras, core = jax.tree.map(
            lambda leaf: np.asarray(leaf)[:calls], results
        )
        self._batches += 1
        self._calls += calls
        self._rows += first.size
        return action, extras, core, np.full(calls, held.version)

    def run(self) -> None:
        """Refresh the variables until the program stops."""
        try:
            while not self._waiting.stop.is_set():
                self.refresh()
                self._waiting.pause(self._refresh_s)
        except ProgramStoppedError:
            return

    def refresh(self) -> bool:
        """Call the learner for newer variables; return whether there were any."""
        version = None if self._held is None else self._held.version
        found = self._waiting.newest_variables(self._learner, version)
        if found is None:
            return False
        placed = jax.device_put(found.values, self._device)
        self._held = Variables(version=found.version, values=placed)
        self._is_ready.set()
        return True

    @accepts()
    def get_version(self) -> int:
        """Return the version of its variables; wait for the first ones.

        Raises:
          ServerStoppedError: The program stops.
        """
        return self._wait_held().version

    @STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return the numbers of `batches`, `calls` and `rows`, and the `version`."""
        return {
            "batches": self._batches,
            "calls": self._calls,
            "rows": self._rows,
            "version": None if self._held is None else self._held.version,
        }

    def _wait_held(self) -> Variables:
        # Callers whose deadline passes meanwhile give up, and call again.
        while not self._is_ready.wait(_LOOK_S):
            if self._waiting.stop.is_set():
                raise ServerStoppedError("`act` has no variables, and the run is over.")
            if rpc.cancelled():
                raise CallCancelledError("The caller of `act` no longer waits.")
        assert self._held is not None
        return self._held


class RemoteInference:
    """Acts by calls of an `InferenceServer`; an `Act` of `unroll`.

    Attributes:
      version: Oldest version that acted in this unroll; None before the first call.
    """

    def __init__(self, client: Any, waiting: Waiting, *, seed: int, index: int) -> None:
        """Make it; nothing is called.

        Args:
          client: Client of the server.
          waiting: Calls the server until it answers.
          seed: Seed of the run.
          index: Index of the actor.
        """
        self.version: int | None = None
        self._client = client
        self._waiting = waiting
        self._seed, self._index = seed, index
        self._key = local_inference.actor_key(seed, index)

    def __call__(
        self, observation: PyTree, first: np.ndarray, core: PyTree, steps: int
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return actions, extras and the next core; see `Act`.

        Raises:
          ProgramStoppedError: The program stops.
        """
        key = np.asarray(local_inference.fold_steps(self._key, np.uint32(steps)))
        place = np.array([self._index, steps], np.int32)
        # Acting changes no state of the server, so a call may be made again.
        action, extras, core, version = self._waiting.call(
            "inference", lambda: self._client.act(observation, first, core, key, place)
        )
        oldest = version if self.version is None else min(self.version, version)
        self.version = int(oldest)
        return action, extras, core

    def first_version(self) -> int:
        """Return the version of the variables that the server has.

        Raises:
          ProgramStoppedError: The program stops.
        """
        return self._waiting.call("inference", lambda: self._client.get_version())

    def reseed(self, start: int) -> None:
        """Use another random key than other starts; see `LocalInference`."""
        self._key = local_inference.actor_key(self._seed, self._index, start)

    def ready_for(self, turn: ActorTurn, ask: Callable[[], ActorTurn]) -> ActorTurn:
        """Begin an unroll; the server has the variables."""
        del ask
        self.version = None
        return turn


def _padded(leaf: np.ndarray, calls: int) -> np.ndarray:
    """Return a leaf with its first row repeated, up to a power of two rows."""
    missing = (1 << (calls - 1).bit_length()) - calls
    if not missing:
        return leaf
    return np.concatenate([leaf, np.repeat(leaf[:1], missing, axis=0)])
