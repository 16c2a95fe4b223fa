"""Run the policy beside the environments, with variables pulled from a learner."""

import logging
from collections.abc import Callable
from typing import Any

from replicator.errors import ReplicatorError
from replicator.launchpad_bridge.acting.local_inference import LocalInference, Policy
from replicator.launchpad_bridge.acting.waiting import (
    HANDLER_WAIT_S,
    UNANSWERED,
    Waiting,
)
from replicator.launchpad_bridge.learner.published import Variables
from replicator.launchpad_bridge.trajectories.table import ActorTurn

_LOG = logging.getLogger(__name__)
_TRIES_BEFORE_WARNING = 10
_PAUSE_S = 0.1


class PulledInference(LocalInference):
    """An `Act` with a learner's variables: the newest, or those of a turn.

    Attributes:
      version: Version of its variables; None before the first.
    """

    def __init__(
        self, policy: Policy, learner: Any, waiting: Waiting, *, seed: int, index: int
    ) -> None:
        """Make it; nothing is pulled.

        Args:
          policy: See `Actor`.
          learner: Client of an object with `get_variables`.
          waiting: Calls the learner until it answers.
          seed: Seed of the run.
          index: Index of the actor.
        """
        super().__init__(policy, seed=seed, index=index)
        self.version: int | None = None
        self._learner = learner
        self._waiting = waiting

    def first_version(self) -> int:
        """Return the version of the variables that it has."""
        assert self.version is not None, "it is ready for a turn"
        return self.version

    def ready_for(self, turn: ActorTurn, ask: Callable[[], ActorTurn]) -> ActorTurn:
        """Pull the variables for a turn.

        A learner that went back to its checkpoint needs other turns first, and would
        never publish the version of this one: so the table is called again.

        Args:
          turn: Next turn of the actor.
          ask: Calls the table for the actor's turn.

        Returns:
          The turn of the pulled variables: `turn`, or the result of `ask`.

        Raises:
          ReplicatorError: The learner refused, and the turn is still the same.
          ProgramStoppedError: The program stops.
        """
        if turn.version is None:
            self._pull_newest()
            return turn
        tries = 0
        while turn.version is not None and turn.version != self.version:
            refused = self._pull(turn.version)
            if self.version == turn.version:
                break
            asked, turn = turn, ask()
            is_same = (turn.number, turn.version) == (asked.number, asked.version)
            if refused is not None and is_same:
                raise refused
            tries += 1
            if tries == _TRIES_BEFORE_WARNING:
                name = self._waiting.name
                _LOG.warning("%s waits for variables %d", name, turn.version)
        return turn

    def _pull_newest(self) -> None:
        while True:
            self._use(self._waiting.newest_variables(self._learner, self.version))
            if self.version is not None:
                return
            self._waiting.pause(_PAUSE_S)  # it has published nothing yet

    def _pull(self, version: int) -> Exception | None:
        """Pull a version if it comes soon; return the error if it never will."""
        try:
            found = self._learner.get_variables(
                version=version, timeout_s=HANDLER_WAIT_S
            )
        except UNANSWERED as error:
            self._waiting.lost(f"variables {version}", error)
            self._waiting.pause(_PAUSE_S)
        except ReplicatorError as error:
            return error
        else:
            self._use(found)
        return None

    def _use(self, found: Variables | None) -> None:
        if found is not None:
            self.use(found.values)
            self.version = found.version
