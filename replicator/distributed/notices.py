"""A shared board: each process publishes its latest value; reads never block.

For threads that poll: whether another process hangs, or wants to stop. Agreement with a
wait is `agreement.exchange`.
"""

import itertools
import json

from replicator.base.types import PyTree
from replicator.distributed import coordination
from replicator.distributed.agreement import Json
from replicator.errors import DistributedError

_ROOT = "replicator/notices/"
_opened = itertools.count()


class Notices:
    """A board in the coordination service's store; each call is one small request.

    All processes must open their boards in the same order.

    Attributes:
      process: Number of this process.
      count: Number of processes.
    """

    def __init__(self) -> None:
        # No lock: the threads of a watchdog and of a `StopAgreement` share a board, and
        # publish under different names.
        self.process = coordination.process_index()
        self.count = coordination.process_count()
        # A run must not read the notices of the run before it.
        self._board = f"{_ROOT}{next(_opened)}/"

    def publish(self, name: str, value: Json) -> None:
        """Publish a notice, in place of this process's last one of that name.

        Raises:
          DistributedError: The coordination service does not answer.
        """
        key = f"{self._board}{name}/{self.process}"
        try:
            self._client().key_value_set(key, json.dumps(value), allow_overwrite=True)
        except coordination.ServiceError as failure:
            raise _lost(failure) from failure

    def peek(self, name: str) -> list[PyTree]:
        """Return the newest notice of each process; None for a process without one.

        Raises:
          DistributedError: The coordination service does not answer.
        """
        try:
            pairs = self._client().key_value_dir_get(f"{self._board}{name}/")
        except coordination.ServiceError as failure:
            raise _lost(failure) from failure
        found: list[PyTree] = [None] * self.count
        for key, value in pairs:
            found[int(key.rpartition("/")[2])] = json.loads(value)
        return found

    def _client(self):
        if (client := coordination.coordination_client()) is None:
            raise DistributedError(
                "`jax.distributed` must be up while a run is, got none. Shut it down "
                "after the run."
            )
        return client


class OwnNotices(Notices):
    """The board of a process that is alone."""

    def __init__(self) -> None:
        self.process, self.count = 0, 1
        self._published: dict[str, str] = {}

    def publish(self, name: str, value: Json) -> None:
        """Publish a notice."""
        self._published[name] = json.dumps(value)

    def peek(self, name: str) -> list[PyTree]:
        """Return the notice, or None, in a list."""
        return [json.loads(self._published.get(name, "null"))]


def open_notices() -> Notices:
    """Open a board for all processes of this run; a private one with one process."""
    return OwnNotices() if coordination.coordination_client() is None else Notices()


def _lost(failure: Exception) -> DistributedError:
    reason = str(failure).splitlines()[0]
    return DistributedError(
        f"The coordination service must answer, got: {reason}. See why process 0, "
        "which serves it, ended."
    )
